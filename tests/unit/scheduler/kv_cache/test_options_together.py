"""Pins, full-prompt hits, verification, shares and miss reasons in any order keep the pool whole.

Blocks carry contents here as on a device: a step writes its tokens, a copy copies, and whatever a
request reads must be its own prefix.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from reprise_core.ids import BlockId
from reprise_scheduler.kv_cache.config import GroupKind, GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager
from reprise_scheduler.kv_cache.pins import Pin
from reprise_scheduler.kv_cache.tenant_shares import TenantShares
from unit.scheduler.kv_cache.simple_request import SimpleRequest

BLOCK = 2
CONFIGS = {
    "one full": KVCacheConfig(
        num_blocks=16,
        groups=[GroupSpec(block_size=BLOCK)],
        full_prompt_hit=True,
        verify_tokens=True,
        track_misses=True,
        max_pinned_blocks=6,
    ),
    "full and sliding": KVCacheConfig(
        num_blocks=28,
        groups=[GroupSpec(block_size=BLOCK), GroupSpec(kind=GroupKind.SLIDING, block_size=BLOCK, window=4)],
        full_prompt_hit=True,
        track_misses=True,
        max_pinned_blocks=8,
    ),
}


class OptionsMachine(RuleBasedStateMachine):
    config: KVCacheConfig

    @initialize()
    def start(self) -> None:
        policy = TenantShares(self.config.num_blocks, {"greedy": 0.2})
        self.manager = KVCacheManager(self.config, eviction_policy=policy)
        self.running: dict[str, SimpleRequest] = {}
        self.device: dict[BlockId, list[tuple[str | None, tuple[int, ...]] | None]] = {}
        self.num_requests = 0
        self.now = 0

    @rule(
        shared=st.integers(0, 10),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        tenant=st.sampled_from(["greedy", "modest"]),
        salt=st.sampled_from([None, None, "s"]),
    )
    def admit(self, shared: int, own: list[int], tenant: str, salt: str | None) -> None:
        self.num_requests += 1
        tokens = [7, 8, 8, 7, 9, 7, 7, 9, 9, 8][:shared] + own
        request = SimpleRequest(
            f"{self.num_requests}", tokens, block_size=BLOCK, tenant=tenant, cache_salt=salt
        )
        hit = self.manager.lookup(request)
        assert hit.num_tokens < len(tokens)
        self.manager.explain_miss(request, hit)
        num_new = len(tokens) - hit.num_tokens
        got = self.manager.allocate(request, num_new, num_computed_tokens=0, hit=hit, is_admission=True)
        if got is not None:
            self.running[request.name] = request
            self.execute(request, hit.num_tokens)

    @rule(data=st.data(), token=st.integers(0, 1))
    def step(self, data: Any, token: int) -> None:
        if self.running:
            request = self.running[data.draw(st.sampled_from(sorted(self.running)))]
            num_computed = len(request.token_ids)
            request.token_ids.append(token)
            if self.manager.allocate(request, 1, num_computed_tokens=num_computed) is None:
                self.finish(request)
            else:
                self.execute(request, num_computed)

    def execute(self, request: SimpleRequest, num_computed: int) -> None:
        """What the worker does: copies, then writes the new tokens, then reads what is attended to."""
        for copy in self.manager.take_copies():
            self.device[copy.target] = list(self.device[copy.source])
        tables = self.manager.block_ids(request.request_id)
        tokens, salt = request.token_ids, request.cache_salt
        for table in tables:
            for i in range(num_computed, len(tokens)):
                slots = self.device.setdefault(table[i // BLOCK], [None] * BLOCK)
                slots[i % BLOCK] = (salt, tuple(tokens[: i + 1]))
        for spec, table in zip(self.config.groups, tables, strict=True):
            first = max(0, num_computed - (spec.window or len(tokens) + 1) + 1)
            for i in range(first, len(tokens)):
                assert self.device[table[i // BLOCK]][i % BLOCK] == (salt, tuple(tokens[: i + 1]))

    @rule(data=st.data())
    def end(self, data: Any) -> None:
        if self.running:
            self.finish(self.running[data.draw(st.sampled_from(sorted(self.running)))])

    def finish(self, request: SimpleRequest) -> None:
        del self.running[request.name]
        self.manager.free(request)

    @rule(data=st.data(), lasts=st.sampled_from([None, 1, 5]))
    def pin(self, data: Any, lasts: int | None) -> None:
        if self.running:
            request = self.running[data.draw(st.sampled_from(sorted(self.running)))]
            expires_at = None if lasts is None else self.now + lasts
            self.manager.pin_prefix(request, expires_at=expires_at)

    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        pins: list[Pin] = self.manager.pins()
        if pins:
            assert self.manager.unpin(data.draw(st.sampled_from(pins)).pin_id)

    @rule(steps=st.integers(0, 3))
    def pass_time(self, steps: int) -> None:
        self.now += steps
        for pin in self.manager.expire_pins(self.now):
            assert pin.expires_at is not None
            assert pin.expires_at <= self.now

    @rule()
    def reset(self) -> None:
        assert self.manager.reset() == (not self.running)

    @invariant()
    def whole(self) -> None:
        self.manager.check_invariants()
        assert self.manager.num_pinned_blocks <= self.config.max_pinned_blocks
        for pin in self.manager.pins():
            assert all(self.manager.ref_counts()[block_id] for block_id in pin.block_ids)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for request in list(self.running.values()):
            self.finish(request)
        assert self.manager.reset()
        assert self.manager.num_free_blocks == self.config.num_blocks - 1
        assert self.manager.num_collisions == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_options_together(name: str) -> None:
    machine = type("Machine", (OptionsMachine,), {"config": CONFIGS[name]})
    machine.TestCase.settings = settings(
        max_examples=50, stateful_step_count=40, deadline=None, print_blob=True
    )
    machine.TestCase().runTest()
