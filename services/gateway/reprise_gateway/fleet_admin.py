"""What concerns every engine at once: reset and metrics."""

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from reprise_gateway.engine_link import EngineLink
from reprise_gateway.exposition import merge_expositions
from reprise_gateway.fleet import Fleet
from reprise_wire.error_codec import PeerError


class FleetAdmin:
    def __init__(
        self, fleet: Fleet, registry: CollectorRegistry, *, reset_timeout_s: float, metrics_timeout_s: float
    ) -> None:
        self._fleet = fleet
        self._registry = registry
        self._reset_timeout_s = reset_timeout_s
        self._metrics_timeout_s = metrics_timeout_s

    async def reset(self, *, reset_running_requests: bool, reset_external: bool) -> dict[str, Any]:
        """Success is that of every tier of every engine; each is told beside it."""
        engines = await asyncio.gather(
            *(self._reset_one(link, reset_running_requests, reset_external) for link in self._fleet.links)
        )
        success = all(one["device"] and one["external"] is not False for one in engines)
        return {"success": success, "engines": engines}

    async def _reset_one(
        self, link: EngineLink, reset_running_requests: bool, reset_external: bool
    ) -> dict[str, Any]:
        engine_id = link.info.engine_id if link.info is not None else link.address
        try:
            answer = await link.api.reset_prefix_cache(
                reset_running_requests=reset_running_requests,
                reset_external=reset_external,
                timeout_s=self._reset_timeout_s,
            )
        except PeerError as error:
            external = False if reset_external else None
            return {"engine_id": engine_id, "device": False, "external": external, "error": str(error)}
        return {"engine_id": engine_id, "device": answer.device, "external": answer.external}

    async def metrics(self) -> str:
        """Every engine's exposition and our own as one; engines that do not answer are left out."""
        texts = await asyncio.gather(*(self._metrics_of(link) for link in self._fleet.links))
        return merge_expositions([*texts, generate_latest(self._registry).decode()])

    async def _metrics_of(self, link: EngineLink) -> str:
        try:
            return await link.api.metrics(timeout_s=self._metrics_timeout_s)
        except PeerError:
            return ""
