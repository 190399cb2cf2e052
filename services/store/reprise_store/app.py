"""Wires the store together."""

import asyncio
import secrets
from time import monotonic

from prometheus_client import CollectorRegistry

from reprise.v1.store_service_pb2_grpc import add_StoreServiceServicer_to_server
from reprise_runtime.grpc_server import GrpcServer
from reprise_runtime.health import Readiness
from reprise_runtime.logs import get_logger
from reprise_runtime.tracing import Tracing
from reprise_store.adapters.block_server import BlockServer
from reprise_store.adapters.redis_backend import RedisBackend, RedisLimits
from reprise_store.breaker import CircuitBreaker
from reprise_store.external_tier import ExternalTier
from reprise_store.generations import Generations
from reprise_store.memory_backend import MemoryBackend
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import BackendBusy, BackendDown
from reprise_store.servicer import SERVICE_NAME, StoreServicer
from reprise_store.settings import StoreSettings
from reprise_store.tiered_store import TieredStore
from reprise_store.write_behind import WriteBehind

GENERATION_BITS = 48
SWEEP_INTERVAL_S = 0.25
GAUGE_INTERVAL_S = 1.0


class StoreApp:
    """Ready once both sockets are bound: Redis may come later, go, and come back."""

    def __init__(self, settings: StoreSettings) -> None:
        self.registry = CollectorRegistry()
        self.readiness = Readiness("grpc", "blocks")
        self._settings = settings
        self._log = get_logger()
        self._metrics = StoreMetrics(self.registry)
        self._tracing = Tracing(settings.trace_exporter, settings.service, self.registry)
        self._redis: RedisBackend | None = None
        self._external: ExternalTier | None = None
        self._write_behind: WriteBehind | None = None
        if settings.redis_url:
            self._make_external()
        self.store = TieredStore(
            MemoryBackend(settings.capacity_bytes, self._metrics.host_evictions.inc),
            external=self._external,
            write_behind=self._write_behind,
            generations=Generations(_draw_generation),
            lookup_chunk_keys=settings.redis_chunk_keys,
            metrics=self._metrics,
        )
        self._blocks = BlockServer(
            settings.blocks_endpoint,
            store=self.store,
            metrics=self._metrics,
            load_concurrency=settings.load_concurrency,
            load_queue_requests=settings.load_queue_requests,
            max_transfer_blocks=settings.max_transfer_blocks,
            max_value_bytes=settings.max_value_bytes,
        )
        servicer = StoreServicer(
            self.store, max_lookup_blocks=settings.max_lookup_blocks, metrics=self._metrics
        )
        self._grpc = GrpcServer(
            settings.listen_address,
            services=[SERVICE_NAME],
            add=lambda server: add_StoreServiceServicer_to_server(servicer, server),  # type: ignore[no-untyped-call]
            tracing=self._tracing,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.blocks_endpoint = settings.blocks_endpoint

    async def start(self) -> None:
        self.blocks_endpoint = self._blocks.bind()
        self.readiness.met("blocks")
        await self._grpc.start()
        self.readiness.met("grpc")
        if self._external is None:
            self._log.info("no redis_url: blocks live in host memory alone")
        self._start_tasks()

    async def run(self) -> None:
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        await self._grpc.stop(self._settings.drain_timeout_s)
        if self._write_behind is not None:
            await self._write_behind.drain(self._settings.drain_timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._blocks.close()
        if self._redis is not None:
            await self._redis.close()
        await asyncio.to_thread(self._tracing.close)

    def _make_external(self) -> None:
        settings = self._settings
        limits = RedisLimits(
            timeout_s=settings.redis_timeout_s,
            connections=settings.redis_connections,
            chunk_bytes=settings.redis_chunk_bytes,
            chunk_keys=settings.redis_chunk_keys,
            ttl_s=settings.block_ttl_s,
        )
        self._redis = RedisBackend(settings.redis_url, limits)
        calls, writes = (
            CircuitBreaker(failures=failures, cooldown_s=settings.breaker_cooldown_s, clock=monotonic)
            for failures in (settings.breaker_failures, 1)
        )
        self._external = ExternalTier(
            self._redis,
            calls=calls,
            writes=writes,
            probe=self._probe_redis,
            on_recovered=self._advise_on_memory,
            probe_interval_s=settings.breaker_cooldown_s / 4,
            idle_s=settings.breaker_cooldown_s,
            clock=monotonic,
            metrics=self._metrics,
        )
        self._write_behind = WriteBehind(
            self._external,
            limit_blocks=settings.save_queue_blocks,
            limit_bytes=settings.save_queue_bytes,
            chunk_bytes=settings.redis_chunk_bytes,
            metrics=self._metrics,
        )

    def _start_tasks(self) -> None:
        forever = [self._blocks.serve_forever(), self._show_forever()]
        if self._external is not None and self._write_behind is not None:
            forever += [self._external.probe_forever(), self._sweep_forever()]
            forever += [self._write_behind.write_forever() for _ in range(self._settings.save_writers)]
        self._tasks = [asyncio.ensure_future(task) for task in forever]

    async def _probe_redis(self) -> None:
        assert self._redis is not None
        await self._redis.forget_connections()
        await self._redis.ping()

    async def _advise_on_memory(self) -> None:
        assert self._redis is not None
        try:
            policy = await self._redis.memory_policy()
        except (BackendDown, BackendBusy):
            return
        if policy.advice:
            self._log.warning("redis memory policy", advice=policy.advice, maxmemory_bytes=policy.max_bytes)

    async def _sweep_forever(self) -> None:
        while True:
            await self.store.sweep_once()
            await asyncio.sleep(SWEEP_INTERVAL_S)

    async def _show_forever(self) -> None:
        while True:
            self.store.show()
            await asyncio.sleep(GAUGE_INTERVAL_S)


def _draw_generation() -> int:
    """See redis_backend: large and random, so that a lost generation never comes back."""
    return 1 + secrets.randbits(GENERATION_BITS)
