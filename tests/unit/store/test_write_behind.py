"""The queue to Redis: bounded, and dropping is its only back-pressure."""

import asyncio
from collections.abc import Sequence
from time import monotonic

import pytest
from prometheus_client import CollectorRegistry

from reprise_store.breaker import CircuitBreaker
from reprise_store.external_tier import ExternalTier
from reprise_store.keys import Scope
from reprise_store.memory_backend import MemoryBackend
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import BackendDown, Value
from reprise_store.write_behind import Pending, WriteBehind

SCOPE, OTHER = Scope("n", "a"), Scope("n", "b")


class Slow(MemoryBackend):
    """A backend that waits for `go`, fails when told, and has room for so many bytes."""

    def __init__(self, capacity_bytes: int = 10**9) -> None:
        super().__init__(capacity_bytes)
        self.go = asyncio.Event()
        self.down = False
        self.batches: list[int] = []

    async def put(self, scope: Scope, items: Sequence[tuple[str, Value]]) -> list[bool]:
        await self.go.wait()
        if self.down:
            raise BackendDown("down")
        self.batches.append(len(items))
        return await super().put(scope, items)


class Bench:
    def __init__(self, backend: Slow, **limits: int) -> None:
        self.registry = CollectorRegistry()
        metrics = StoreMetrics(self.registry)
        self.backend = backend

        async def nothing() -> None: ...

        tier = ExternalTier(
            backend,
            calls=CircuitBreaker(failures=3, cooldown_s=60, clock=monotonic),
            writes=CircuitBreaker(failures=1, cooldown_s=60, clock=monotonic),
            probe=nothing,
            on_recovered=nothing,
            probe_interval_s=1,
            idle_s=60,
            clock=monotonic,
            metrics=metrics,
        )
        defaults = {"limit_blocks": 100, "limit_bytes": 10**6, "chunk_bytes": 100}
        self.queue = WriteBehind(tier, **{**defaults, **limits}, metrics=metrics)

    def offer(self, number: int, *, size: int = 10, scope: Scope = SCOPE, generation: int = 1) -> bool:
        return self.queue.offer(Pending(scope, generation, f"{scope}{number}", b"x" * size))

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"reprise_store_{name}", labels) or 0.0


@pytest.fixture
def backend() -> Slow:
    return Slow()


async def test_blocks_beyond_the_limit_are_dropped(backend: Slow) -> None:
    bench = Bench(backend, limit_blocks=3)
    assert [bench.offer(i) for i in range(5)] == [True, True, True, False, False]
    assert bench.metric("saves_dropped_total", reason="queue_full") == 2
    assert bench.metric("save_queue_blocks") == 3


async def test_bytes_beyond_the_limit_are_dropped(backend: Slow) -> None:
    bench = Bench(backend, limit_bytes=25)
    assert [bench.offer(i) for i in range(3)] == [True, True, False]
    assert bench.offer(9, size=5)
    assert bench.metric("save_queue_bytes") == 25


async def test_batches_hold_one_scope_and_about_a_chunk(backend: Slow) -> None:
    bench = Bench(backend)
    for number in range(15):
        bench.offer(number)
    bench.offer(0, scope=OTHER)
    bench.offer(1, scope=OTHER, size=500)
    writer = asyncio.ensure_future(bench.queue.write_forever())
    backend.go.set()
    await bench.queue.drain(5)
    writer.cancel()
    assert backend.batches == [10, 5, 1, 1]
    assert bench.metric("save_queue_bytes") == 0
    assert bench.metric("save_bytes_total", tier="external") == 660


async def test_what_a_reset_made_useless_is_not_written(backend: Slow) -> None:
    bench = Bench(backend)
    bench.offer(0, generation=1)
    bench.offer(1, generation=2)
    bench.offer(2, generation=1, scope=OTHER)
    bench.queue.forget(SCOPE, 2)
    writer = asyncio.ensure_future(bench.queue.write_forever())
    backend.go.set()
    await bench.queue.drain(5)
    writer.cancel()
    assert backend.num_blocks == 2
    assert bench.metric("saves_dropped_total", reason="stale") == 1


async def test_nothing_is_written_while_the_breaker_is_open(backend: Slow) -> None:
    bench = Bench(backend)
    backend.down = True
    backend.go.set()
    writer = asyncio.ensure_future(bench.queue.write_forever())
    for number in range(20):
        bench.offer(number, size=100)
    await bench.queue.drain(5)
    writer.cancel()
    assert bench.metric("saves_dropped_total", reason="unavailable") == 20
    assert bench.metric("redis_failures_total", kind="down") == 1, "one call, then none"


async def test_no_room_is_counted_per_block_and_ends_writing() -> None:
    backend = Slow(capacity_bytes=50)
    bench = Bench(backend)
    backend.go.set()
    writer = asyncio.ensure_future(bench.queue.write_forever())
    bench.offer(0, size=20)
    bench.offer(1, size=60)
    await bench.queue.drain(5)
    bench.offer(2, size=20)
    await bench.queue.drain(5)
    writer.cancel()
    assert bench.metric("saves_dropped_total", reason="no_room") == 1
    assert bench.metric("saves_dropped_total", reason="unavailable") == 1
    assert bench.metric("breaker_state", breaker="writes") == 2
    assert bench.metric("breaker_state", breaker="calls") == 0


async def test_a_drain_that_takes_too_long_counts_what_is_left(backend: Slow) -> None:
    bench = Bench(backend)
    writer = asyncio.ensure_future(bench.queue.write_forever())
    for number in range(15):
        bench.offer(number)
    await bench.queue.drain(0.05)
    writer.cancel()
    assert bench.metric("saves_dropped_total", reason="unavailable") == 5
