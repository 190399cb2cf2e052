"""Wires the store together."""

import asyncio
import secrets
from pathlib import Path
from time import monotonic

from prometheus_client import CollectorRegistry

from reprise.v1.store_service_pb2_grpc import add_StoreServiceServicer_to_server
from reprise_runtime.grpc_server import GrpcServer
from reprise_runtime.health import Readiness
from reprise_runtime.logs import get_logger
from reprise_runtime.tracing import Tracing
from reprise_store.adapters.block_server import BlockServer
from reprise_store.adapters.disk_tier import DiskTier
from reprise_store.adapters.memory_peers import MemoryPeers
from reprise_store.adapters.redis_backend import RedisBackend, RedisLimits
from reprise_store.adapters.redis_connections import RedisSecurity
from reprise_store.adapters.shared_arena import SharedArena
from reprise_store.breaker import CircuitBreaker
from reprise_store.compressed_backend import CompressedBackend
from reprise_store.external_tier import ExternalTier
from reprise_store.generations import Generations
from reprise_store.memory_backend import MemoryBackend
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import BackendBusy, BackendDown
from reprise_store.servicer import SERVICE_NAME, StoreServicer
from reprise_store.settings import StoreSettings
from reprise_store.tier_changes import TierChanges
from reprise_store.tiered_store import TieredStore
from reprise_store.value_codec import Codec
from reprise_store.write_behind import WriteBehind

GENERATION_BITS = 48
SWEEP_INTERVAL_S = 0.25
GAUGE_INTERVAL_S = 1.0
TRANSIT_BYTES = 64 * 1024 * 1024
"""Room of the arena for values that just came or are being read, beside what the tiers keep."""


class StoreApp:
    """Ready once both sockets are bound: Redis may come later, go, and come back."""

    def __init__(self, settings: StoreSettings) -> None:
        self.registry = CollectorRegistry()
        self.readiness = Readiness("grpc", "blocks")
        self._settings = settings
        self._log = get_logger()
        self._metrics = StoreMetrics(self.registry)
        self._tracing = Tracing(settings.trace_exporter, settings.service, self.registry)
        self._changes = TierChanges(
            max_blocks=settings.tier_changes_blocks,
            max_pending=settings.tier_watch_queue_blocks,
            on_forgotten=self._metrics.tier_changes_forgotten.inc,
            on_restart=self._metrics.tier_watch_restarts.inc,
        )
        self._arena: SharedArena | None = None
        self._memory_peers: MemoryPeers | None = None
        if settings.shared_memory != "off":
            self._share_memory()
        self._disk: DiskTier | None = None
        if settings.disk_folder:
            self._disk = DiskTier(
                Path(settings.disk_folder),
                capacity_bytes=settings.disk_capacity_bytes,
                queue_bytes=settings.disk_queue_bytes,
                metrics=self._metrics,
                changes=self._changes,
            )
        self._redis: RedisBackend | None = None
        self._external: ExternalTier | None = None
        self._write_behind: WriteBehind | None = None
        if settings.redis_url:
            self._make_external()
        self.store = TieredStore(
            MemoryBackend(
                settings.capacity_bytes, self._metrics.host_evictions.inc, self._changes, self._arena
            ),
            external=self._external,
            write_behind=self._write_behind,
            generations=Generations(_draw_generation),
            lookup_chunk_keys=settings.redis_chunk_keys,
            metrics=self._metrics,
            changes=self._changes,
            disk=self._disk,
        )
        self._blocks = BlockServer(
            settings.blocks_endpoint,
            store=self.store,
            metrics=self._metrics,
            load_concurrency=settings.load_concurrency,
            load_queue_requests=settings.load_queue_requests,
            max_transfer_blocks=settings.max_transfer_blocks,
            max_value_bytes=settings.max_value_bytes,
            arena=self._arena,
            memory_peers=self._memory_peers,
        )
        servicer = StoreServicer(
            self.store,
            self._changes,
            max_lookup_blocks=settings.max_lookup_blocks,
            metrics=self._metrics,
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
        if self._disk is not None:
            await asyncio.to_thread(self._disk.open)
        self.blocks_endpoint = self._blocks.bind()
        self.readiness.met("blocks")
        await self._grpc.start()
        self.readiness.met("grpc")
        if self._external is None:
            self._log.info("no redis_url: blocks stay on this machine")
        self._start_tasks()

    async def run(self) -> None:
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        self._changes.close()
        await self._grpc.stop(self._settings.drain_timeout_s)
        if self._write_behind is not None:
            await self._write_behind.drain(self._settings.drain_timeout_s)
        if self._disk is not None:
            await self._disk.drain(self._settings.drain_timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._blocks.close()
        if self._memory_peers is not None:
            await self._memory_peers.close()
        if self._redis is not None:
            await self._redis.close()
        if self._disk is not None:
            self._disk.close()
        await asyncio.to_thread(self._tracing.close)

    def _share_memory(self) -> None:
        """Where workers of this machine read block bytes; nothing where the system has no such memory."""
        settings = self._settings
        # An eighth more than the tier: values end within a page.
        queues_bytes = settings.save_queue_bytes + (settings.disk_queue_bytes if settings.disk_folder else 0)
        budget_bytes = settings.capacity_bytes * 9 // 8 + queues_bytes + TRANSIT_BYTES
        try:
            arena = SharedArena(budget_bytes, on_full=self._metrics.memory_full.inc)
            peers = MemoryPeers(
                arena.memory,
                arena.index_place if settings.capacity_bytes else None,
                lease_timeout_s=settings.lease_timeout_s,
                metrics=self._metrics,
            )
            peers.bind("" if settings.shared_memory == "auto" else settings.shared_memory)
        except OSError as error:
            self._log.warning("no shared memory; block bytes go through sockets", error=str(error))
            return
        self._arena, self._memory_peers = arena, peers

    def _make_external(self) -> None:
        settings = self._settings
        limits = RedisLimits(
            timeout_s=settings.redis_timeout_s,
            connections=settings.redis_connections,
            chunk_bytes=settings.redis_chunk_bytes,
            chunk_keys=settings.redis_chunk_keys,
            max_value_bytes=settings.max_value_bytes,
            ttl_s=settings.block_ttl_s,
        )
        self._redis = RedisBackend(
            settings.redis_url,
            limits,
            make_breaker=lambda: self._make_breaker(settings.breaker_failures),
            security=RedisSecurity(
                password_file=settings.redis_password_file,
                tls_ca_file=settings.redis_tls_ca_file,
                tls_cert_file=settings.redis_tls_cert_file,
                tls_key_file=settings.redis_tls_key_file,
                sentinel_user=settings.redis_sentinel_user,
                sentinel_password_file=settings.redis_sentinel_password_file,
            ),
            allocate=self._allocate,
        )
        compressed = CompressedBackend(
            self._redis,
            Codec[settings.codec.upper()],
            max_value_bytes=settings.max_value_bytes,
            allocate=self._allocate,
            metrics=self._metrics,
        )
        self._external = ExternalTier(
            compressed,
            calls=self._make_breaker(settings.breaker_failures),
            writes=self._make_breaker(1),
            probe=self._redis.probe,
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
            max_age_s=settings.save_queue_age_s,
            pause_s=settings.breaker_cooldown_s / 4,
            chunk_bytes=settings.redis_chunk_bytes,
            metrics=self._metrics,
            changes=self._changes,
        )

    def _start_tasks(self) -> None:
        self._blocks.start()
        forever = [self._show_forever()]
        if self._memory_peers is not None:
            forever.append(self._memory_peers.serve_forever(self._blocks.receive_by_memory))
        if self._disk is not None:
            forever.append(self._disk.write_forever())
        if self._external is not None and self._write_behind is not None:
            forever += [self._external.probe_forever(), self._sweep_forever()]
            writers = range(self._settings.save_writers)
            forever += [self._write_behind.write_forever(self.store.settle_generation) for _ in writers]
        self._tasks = [asyncio.ensure_future(task) for task in forever]

    def _make_breaker(self, failures: int) -> CircuitBreaker:
        return CircuitBreaker(
            failures=failures, cooldown_s=self._settings.breaker_cooldown_s, clock=monotonic
        )

    def _allocate(self, nbytes: int) -> memoryview | None:
        """Memory for a value that comes from Redis: where workers can read it, if there is such."""
        return None if self._arena is None else self._arena.allocate(nbytes)

    async def _advise_on_memory(self) -> None:
        assert self._redis is not None
        try:
            policies = await self._redis.memory_policies()
        except (BackendDown, BackendBusy):
            return
        for policy in policies:
            advice = policy.advice(blocks_expire=self._settings.block_ttl_s > 0)
            if advice:
                self._log.warning(
                    "redis memory policy",
                    advice=advice,
                    node=policy.node,
                    maxmemory_bytes=policy.max_bytes,
                )

    async def _sweep_forever(self) -> None:
        while True:
            await self.store.sweep_once()
            await asyncio.sleep(SWEEP_INTERVAL_S)

    async def _show_forever(self) -> None:
        while True:
            self.store.show()
            self._metrics.memory_bytes.set(self._arena.resident_bytes if self._arena is not None else 0)
            await asyncio.sleep(GAUGE_INTERVAL_S)


def _draw_generation() -> int:
    """See redis_backend: large and random, so that a lost generation never comes back."""
    return 1 + secrets.randbits(GENERATION_BITS)
