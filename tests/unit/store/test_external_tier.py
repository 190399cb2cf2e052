"""One of several servers away is no reason to leave the others alone."""

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from reprise_store.breaker import CircuitBreaker
from reprise_store.external_tier import ExternalTier
from reprise_store.keys import Scope
from reprise_store.memory_backend import MemoryBackend
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import BackendDown, BackendPartlyDown, Presence, Value

SCOPE = Scope("test", "ab" * 16)


class Sharded(MemoryBackend):
    """Does what it is told: fail, or answer for some keys."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.problem: Exception | None = None
        self.taken: list[bool | None] = []

    async def exists(self, scope: Scope, keys: Sequence[str]) -> Presence:
        if self.problem is not None:
            raise self.problem
        return await super().exists(scope, keys)

    async def put(  # type: ignore[override]
        self, scope: Scope, items: Sequence[tuple[str, Value]]
    ) -> Sequence[bool | None]:
        if self.problem is not None:
            raise self.problem
        return self.taken


class Bench:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.now_s = 0.0
        self.backend = Sharded()

        async def nothing() -> None:
            return None

        calls, writes = (
            CircuitBreaker(failures=failures, cooldown_s=1.0, clock=lambda: self.now_s) for failures in (2, 1)
        )
        self.tier = ExternalTier(
            self.backend,
            calls=calls,
            writes=writes,
            probe=nothing,
            on_recovered=nothing,
            probe_interval_s=1.0,
            idle_s=1.0,
            clock=lambda: self.now_s,
            metrics=StoreMetrics(self.registry),
        )

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"reprise_store_{name}", labels) or 0.0

    async def put(self, *taken: bool | None) -> None:
        self.backend.taken = list(taken)
        await self.tier.put(SCOPE, [("k", b"v")] * len(taken))


async def test_a_node_away_opens_no_breaker() -> None:
    bench = Bench()
    assert (await bench.tier.exists(SCOPE, ["k"])).found == [False]
    bench.backend.problem = BackendPartlyDown("node 1 is away")
    for _ in range(5):
        with pytest.raises(BackendPartlyDown):
            await bench.tier.exists(SCOPE, ["k"])
        with pytest.raises(BackendPartlyDown):
            await bench.put(True)
    assert bench.tier.up
    assert bench.tier.writable
    assert bench.metric("redis_failures_total", kind="node") == 10
    bench.backend.problem = BackendDown("all are away")
    for _ in range(2):
        with pytest.raises(BackendDown):
            await bench.tier.exists(SCOPE, ["k"])
    assert not bench.tier.up


async def test_what_one_node_does_not_take_is_no_lack_of_room() -> None:
    bench = Bench()
    await bench.put(True, None)
    assert bench.tier.writable
    await bench.put(True, False)  # one of them may be full
    assert bench.tier.writable
    await bench.put(False, None)
    assert not bench.tier.writable


async def test_a_probing_write_is_settled_also_when_its_node_is_away() -> None:
    bench = Bench()
    await bench.put(False)
    bench.now_s = 1.0
    assert bench.tier.writable  # the probe
    bench.backend.problem = BackendPartlyDown("node 1 is away")
    with pytest.raises(BackendPartlyDown):
        await bench.put(True)
    bench.now_s = 2.0
    assert bench.tier.writable  # another probe
    bench.backend.problem = None
    await bench.put(True)
    assert bench.metric("breaker_state", breaker="writes") == 0
