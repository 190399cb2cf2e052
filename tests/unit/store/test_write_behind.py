"""The queue to Redis: bounded; it waits while Redis is away, and dropping is its only back-pressure."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import pytest
from prometheus_client import CollectorRegistry

from reprise_store.breaker import CircuitBreaker
from reprise_store.external_tier import ExternalTier
from reprise_store.keys import Scope
from reprise_store.memory_backend import MemoryBackend
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import BackendBusy, BackendDown, BackendPartlyDown, Value
from reprise_store.write_behind import Pending, WriteBehind
from support.waiting import until

SCOPE, OTHER = Scope("n", "a"), Scope("n", "b")
COOLDOWN_S = 0.02


class Slow(MemoryBackend):
    """A backend that waits for `go`, fails when told, and has room for so many bytes."""

    def __init__(self, capacity_bytes: int = 10**9) -> None:
        super().__init__(capacity_bytes)
        self.go = asyncio.Event()
        self.problem: Exception | None = None
        self.away: set[str] = set()
        """Keys whose server is away, while others' are not."""
        self.batches: list[int] = []
        self.num_tries = 0

    async def put(  # type: ignore[override]
        self, scope: Scope, items: Sequence[tuple[str, Value]]
    ) -> list[bool | None]:
        await self.go.wait()
        self.num_tries += 1
        if self.problem is not None:
            raise self.problem
        if self.away.issuperset(key for key, _ in items):
            raise BackendPartlyDown("node 1 is away")
        self.batches.append(len(items))
        there = [item for item in items if item[0] not in self.away]
        taken = iter(
            [len(value) <= self.capacity_bytes and self.keep(scope, key, value) for key, value in there]
        )
        return [None if key in self.away else next(taken) for key, _ in items]

    async def probe(self) -> None:
        if self.problem is not None:
            raise self.problem


class Bench:
    def __init__(
        self, backend: Slow, *, failures: int = 1, cooldown_s: float = COOLDOWN_S, **limits: float
    ) -> None:
        self.registry = CollectorRegistry()
        metrics = StoreMetrics(self.registry)
        self.backend = backend
        self.settled: list[Scope] = []
        self.generation = 1

        async def nothing() -> None: ...

        self.tier = ExternalTier(
            backend,
            calls=CircuitBreaker(failures=failures, cooldown_s=cooldown_s, clock=monotonic),
            writes=CircuitBreaker(failures=1, cooldown_s=cooldown_s, clock=monotonic),
            probe=backend.probe,
            on_recovered=nothing,
            probe_interval_s=cooldown_s / 4,
            idle_s=60,
            clock=monotonic,
            metrics=metrics,
        )
        defaults = {
            "limit_blocks": 100,
            "limit_bytes": 10**6,
            "chunk_bytes": 100,
            "max_age_s": 60.0,
            "pause_s": cooldown_s / 4,
        }
        self.queue = WriteBehind(self.tier, **{**defaults, **limits}, metrics=metrics)  # type: ignore[arg-type]

    async def settle(self, scope: Scope) -> None:
        """As a store does it, whose Redis is at `generation`."""
        await self.tier.exists(scope, [])
        self.settled.append(scope)
        if scope == SCOPE:
            self.queue.forget(scope, self.generation)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        forever = [self.queue.write_forever(self.settle) for _ in range(2)]
        tasks = [asyncio.ensure_future(task) for task in [*forever, self.tier.probe_forever()]]
        try:
            yield
            assert not any(task.done() for task in tasks)
            self.queue.check_invariants()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def offer(self, number: int, *, size: int = 10, scope: Scope = SCOPE, generation: int = 1) -> bool:
        return self.queue.offer(Pending(scope, generation, f"{scope}{number}", b"x" * size))

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"reprise_store_{name}", labels) or 0.0

    def dropped(self, reason: str) -> float:
        return self.metric("saves_dropped_total", reason=reason)


@pytest.fixture
def backend() -> Slow:
    return Slow()


async def test_blocks_beyond_the_limit_are_dropped(backend: Slow) -> None:
    bench = Bench(backend, limit_blocks=3)
    assert [bench.offer(i) for i in range(5)] == [True, True, True, False, False]
    assert bench.dropped("queue_full") == 2
    assert bench.metric("save_queue_blocks") == 3


async def test_bytes_beyond_the_limit_are_dropped(backend: Slow) -> None:
    bench = Bench(backend, limit_bytes=25)
    assert [bench.offer(i) for i in range(3)] == [True, True, False]
    assert bench.offer(9, size=5)
    assert bench.metric("save_queue_bytes") == 25


async def test_what_is_being_written_counts_for_the_limit(backend: Slow) -> None:
    bench = Bench(backend, limit_blocks=3)
    async with bench.writing():
        for number in range(3):
            bench.offer(number)
        await until(lambda: not bench.queue._waiting)
        assert not bench.offer(4)
        backend.go.set()
        await bench.queue.drain(5)
        assert bench.offer(5)


async def test_batches_hold_one_scope_and_about_a_chunk(backend: Slow) -> None:
    bench = Bench(backend)
    for number in range(15):
        bench.offer(number)
    bench.offer(0, scope=OTHER)
    bench.offer(1, scope=OTHER, size=500)
    backend.go.set()
    async with bench.writing():
        await bench.queue.drain(5)
    assert backend.batches == [10, 5, 1, 1]
    assert bench.metric("save_queue_bytes") == 0
    assert bench.metric("save_bytes_total", tier="external") == 660


async def test_what_a_reset_made_useless_is_not_written(backend: Slow) -> None:
    bench = Bench(backend)
    bench.offer(0, generation=1)
    bench.offer(1, generation=2)
    bench.offer(2, generation=1, scope=OTHER)
    bench.generation = 2
    bench.queue.forget(SCOPE, 2)
    backend.go.set()
    async with bench.writing():
        await bench.queue.drain(5)
    assert backend.num_blocks == 2
    assert bench.dropped("stale") == 1


@pytest.mark.parametrize("problem", [BackendDown("down"), BackendBusy("busy")])
async def test_what_waits_while_redis_is_away_is_written_when_it_is_back(
    backend: Slow, problem: Exception
) -> None:
    bench = Bench(backend)
    backend.go.set()
    async with bench.writing():
        backend.problem = problem
        for number in range(20):
            assert bench.offer(number, size=30)
        await asyncio.sleep(5 * COOLDOWN_S)
        assert bench.metric("save_queue_blocks") == 20
        bench.queue.check_invariants()
        backend.problem = None
        await bench.queue.drain(10)
    assert backend.num_blocks == 20
    assert bench.metric("saves_total", tier="external", outcome="written") == 20
    assert bench.metric("saves_total", tier="external", outcome="dropped") == 0
    assert bench.metric("save_retries_total") > 0


async def test_nobody_calls_a_redis_that_is_left_alone(backend: Slow) -> None:
    bench = Bench(backend, cooldown_s=60, pause_s=0.001)
    backend.go.set()
    backend.problem = BackendDown("down")
    async with bench.writing():
        bench.offer(0)
        await asyncio.sleep(0.05)
        assert bench.metric("redis_failures_total", kind="down") == 1
        assert bench.metric("save_queue_blocks") == 1


async def test_a_flood_while_redis_is_away_stays_within_the_limit(backend: Slow) -> None:
    bench = Bench(backend, limit_bytes=1000)
    backend.go.set()
    backend.problem = BackendDown("down")
    async with bench.writing():
        took = 0
        for number in range(1000):
            took += bench.offer(number)
            if number % 50 == 0:
                await asyncio.sleep(0.001)
            bench.queue.check_invariants()
        assert (took, bench.dropped("queue_full")) == (100, 900)
        backend.problem = None
        await bench.queue.drain(10)
        # The oldest were kept.
        assert set(backend._blocks) == {f"{SCOPE}{number}" for number in range(100)}


async def test_what_waits_too_long_is_dropped(backend: Slow) -> None:
    bench = Bench(backend, max_age_s=0.1)
    backend.go.set()
    backend.problem = BackendDown("down")
    async with bench.writing():
        for number in range(10):
            bench.offer(number)
        await until(lambda: bench.dropped("expired") == 10, 10)
        backend.problem = None
        bench.offer(10)
        await bench.queue.drain(10)
    assert list(backend._blocks) == [f"{SCOPE}10"]


async def test_after_an_outage_the_generation_is_asked_for_first(backend: Slow) -> None:
    bench = Bench(backend)
    backend.go.set()
    async with bench.writing():
        bench.offer(0)
        await bench.queue.drain(5)
        backend.problem = BackendDown("down")
        bench.offer(1)
        bench.offer(2, scope=OTHER)
        await until(lambda: bench.tier.num_failures > 0)
        bench.generation = 2  # Redis came back without it, or another store made a reset
        bench.offer(3)
        backend.problem = None
        await bench.queue.drain(10)
    assert set(backend._blocks) == {f"{SCOPE}0", f"{OTHER}2"}
    assert bench.dropped("stale") == 2
    assert bench.metric("saves_total", tier="external", outcome="written") == 2


async def test_a_write_that_fails_after_a_reset_is_not_tried_again(backend: Slow) -> None:
    bench = Bench(backend, failures=3)
    async with bench.writing():
        bench.offer(0)
        await until(lambda: bench.queue._writing != [])
        bench.generation = 2
        bench.queue.forget(SCOPE, 2)
        backend.problem = BackendDown("down")
        backend.go.set()
        await bench.queue.drain(5)
    assert bench.dropped("stale") == 1
    assert backend.num_tries == 1


async def test_a_node_that_is_away_holds_up_nobody_elses_blocks(backend: Slow) -> None:
    bench = Bench(backend, limit_bytes=400)
    backend.go.set()
    backend.away = {f"{SCOPE}{number}" for number in range(0, 1000, 2)}
    async with bench.writing():
        for number in range(200):
            while bench.metric("save_queue_bytes") > 300:
                await asyncio.sleep(0.001)
            assert bench.offer(number)
            bench.queue.check_invariants()
        await until(lambda: backend.num_blocks == 100, 10)
        # At most half of the queue is theirs; what was kept is written when it is back.
        num_kept = int(bench.metric("save_queue_blocks"))
        assert 0 < num_kept <= 20
        assert bench.dropped("unavailable") == 100 - num_kept
        backend.away = set()
        await bench.queue.drain(10)
        assert backend.num_blocks == 100 + num_kept
        assert bench.tier.up


async def test_less_is_tried_at_once_after_each_failure(backend: Slow) -> None:
    bench = Bench(backend, failures=1000, chunk_bytes=160)
    tried: list[int] = []
    put = backend.put

    async def too_slow(scope: Scope, items: Sequence[tuple[str, Value]]) -> list[bool | None]:
        tried.append(len(items))
        backend.problem = BackendDown("no answer in time") if len(items) > 3 else None
        return await put(scope, items)

    backend.put = too_slow  # type: ignore[method-assign]
    backend.go.set()
    async with bench.writing():
        for number in range(16):
            bench.offer(number)
        await bench.queue.drain(10)
    assert tried[0] == 16
    assert tried.count(8) == 2
    assert backend.num_blocks == 16


async def test_no_room_is_counted_and_what_waits_is_kept() -> None:
    backend = Slow(capacity_bytes=50)
    bench = Bench(backend)
    backend.go.set()
    async with bench.writing():
        bench.offer(0, size=60)
        await bench.queue.drain(5)
        assert bench.dropped("no_room") == 1
        assert bench.metric("breaker_state", breaker="writes") == 2
        for number in range(1, 6):
            bench.offer(number, size=60)
        # One block at a time shows whether there is room.
        await until(lambda: bench.dropped("no_room") >= 3, 10)
        assert backend.batches[:3] == [1, 1, 1]
        assert bench.metric("breaker_state", breaker="calls") == 0
        backend.capacity_bytes = 10**9
        await bench.queue.drain(10)
        await until(lambda: bench.metric("breaker_state", breaker="writes") == 0)
    assert bench.dropped("no_room") + backend.num_blocks == 6
    assert bench.metric("save_retries_total") == 0


async def test_a_drain_that_takes_too_long_counts_what_is_left(backend: Slow) -> None:
    bench = Bench(backend)
    async with bench.writing():
        for number in range(25):
            bench.offer(number)
        await bench.queue.drain(0.05)
        assert bench.dropped("unavailable") == 5


async def test_every_block_is_written_or_counted(backend: Slow) -> None:
    """Whatever fails, and in whatever order."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    bench = Bench(backend, failures=2, limit_bytes=600, cooldown_s=0.004, max_age_s=0.1)
    backend.go.set()
    async with bench.writing():
        for number in range(600):
            problems = [None, None, BackendDown("down"), BackendBusy("busy"), BackendPartlyDown("one")]
            backend.problem = rng.choice(problems) if number % 10 == 0 else backend.problem
            backend.away = {f"{SCOPE}{near}" for near in range(number) if rng.random() < 0.2}
            bench.generation += rng.random() < 0.02
            if rng.random() < 0.05:
                bench.queue.forget(SCOPE, bench.generation)
            bench.offer(number, size=rng.randint(1, 60), generation=bench.generation - (rng.random() < 0.1))
            bench.queue.check_invariants()
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
        backend.problem, backend.away = None, set()
        await bench.queue.drain(10)
    written, dropped = (
        bench.metric("saves_total", tier="external", outcome=how) for how in ("written", "dropped")
    )
    assert written + dropped == 600
    assert written == backend.num_blocks > 0
    reasons = ("queue_full", "expired", "unavailable", "no_room", "stale")
    assert sum(map(bench.dropped, reasons)) == dropped == bench.queue.num_dropped
