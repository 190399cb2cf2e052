"""What concerns every engine at once: reset, pins and metrics."""

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from reprise_gateway.engine_link import EngineLink
from reprise_gateway.errors import ApiError, bad_rule, from_reprise_error
from reprise_gateway.exposition import merge_expositions
from reprise_gateway.fleet import Fleet
from reprise_wire.clients.engine import PinInfo
from reprise_wire.error_codec import PeerError

_MAX_PIN_DIGITS = 19
"""Longer numbers do not fit in 64 bits."""


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
        engine_id = _engine_id(link)
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

    async def pins(self) -> dict[str, Any]:
        """Each engine's pins, the oldest first. An id names the engine too: `engine-0:3`."""
        return {"engines": await asyncio.gather(*(self._pins_of(link) for link in self._fleet.links))}

    async def _pins_of(self, link: EngineLink) -> dict[str, Any]:
        engine_id = _engine_id(link)
        try:
            pins = await link.api.pins(timeout_s=self._metrics_timeout_s)
        except PeerError as error:
            return {"engine_id": engine_id, "pins": [], "error": str(error)}
        shown = [{"id": f"{engine_id}:{pin.pin_id}", **_without_id(pin)} for pin in pins]
        return {"engine_id": engine_id, "pins": shown}

    async def unpin(self, name: str) -> None:
        """Raises ApiError for a name that is none, and for a pin that is not there."""
        engine_id, colon, number = name.rpartition(":")
        if not colon or not (number.isascii() and number.isdigit()) or len(number) > _MAX_PIN_DIGITS:
            raise bad_rule("id", f"id: {name!r:.60}, must have the form ENGINE:NUMBER")
        for link in self._fleet.links:
            if _engine_id(link) == engine_id:
                try:
                    await link.api.unpin(int(number), timeout_s=self._metrics_timeout_s)
                except PeerError as error:
                    raise from_reprise_error(error) from error
                return
        raise ApiError(404, f"id: there is no engine {engine_id!r:.60}", param="id")

    async def metrics(self) -> str:
        """Every engine's exposition and our own as one; engines that do not answer are left out."""
        texts = await asyncio.gather(*(self._metrics_of(link) for link in self._fleet.links))
        return merge_expositions([*texts, generate_latest(self._registry).decode()])

    async def _metrics_of(self, link: EngineLink) -> str:
        try:
            return await link.api.metrics(timeout_s=self._metrics_timeout_s)
        except PeerError:
            return ""


def _engine_id(link: EngineLink) -> str:
    return link.info.engine_id if link.info is not None else link.address


def _without_id(pin: PinInfo) -> dict[str, Any]:
    return {
        "tenant": pin.tenant,
        "num_tokens": pin.num_tokens,
        "num_blocks": pin.num_blocks,
        "expires_in_s": pin.expires_in_s,
    }
