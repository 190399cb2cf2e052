"""Any sequence of calls: the manager and a plain one, written block by block, do the same.

hypothesis prints the failing sequence and, with `print_blob`, a line that repeats it.
"""

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reprise_cli.bench.plain_kv_cache import PlainBlock, PlainEvent, PlainKVCache
from reprise_core.extra_keys import LoraAdapter
from reprise_core.ids import BlockHash, BlockId, RequestId
from reprise_core.kv_events import BlockRemoved, BlockStored, KvEvent
from reprise_scheduler.kv_cache.config import GroupKind, GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager
from reprise_scheduler.kv_cache.tenant_shares import TenantShares

FULL, SLIDING = GroupKind.FULL, GroupKind.SLIDING


def sliding(block_size: int, window: int) -> GroupSpec:
    return GroupSpec(kind=SLIDING, block_size=block_size, window=window)


def full(block_size: int) -> GroupSpec:
    return GroupSpec(block_size=block_size)


CONFIGS = {
    "one full": KVCacheConfig(num_blocks=14, groups=[full(2)]),
    "one full, last block dropped": KVCacheConfig(num_blocks=14, groups=[full(2)], use_eagle=True),
    "one full, caching off": KVCacheConfig(num_blocks=14, groups=[full(2)], enable_caching=False),
    "one sliding": KVCacheConfig(num_blocks=12, groups=[sliding(2, 5)]),
    "one sliding, last block dropped": KVCacheConfig(num_blocks=14, groups=[sliding(2, 4)], use_eagle=True),
    "full and sliding": KVCacheConfig(num_blocks=24, groups=[full(2), sliding(2, 4)]),
    "full and sliding, sparse": KVCacheConfig(
        num_blocks=24, groups=[full(2), sliding(2, 4)], retention_interval=0
    ),
    "coarse full, fine sliding": KVCacheConfig(num_blocks=24, groups=[full(4), sliding(2, 4)]),
    "fine full, coarse sliding, interval": KVCacheConfig(
        num_blocks=26, groups=[full(2), sliding(4, 5)], retention_interval=8
    ),
    "one full, watched": KVCacheConfig(
        num_blocks=14, groups=[full(2)], verify_tokens=True, track_misses=True
    ),
    "full and sliding, watched": KVCacheConfig(
        num_blocks=24, groups=[full(2), sliding(2, 4)], verify_tokens=True, track_misses=True
    ),
    "two full, one sliding": KVCacheConfig(num_blocks=30, groups=[full(4), full(2), sliding(2, 3)]),
}


@dataclass
class StubRequest:
    request_id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    hash_block_size: int
    cache_salt: str | None
    skip_lookup: bool
    num_computed: int = 0
    num_preemptions: int = 0
    report_full: bool = False
    lora: LoraAdapter | None = None
    junction_tokens: int = 0
    tenant: str = ""
    hashed: list[BlockHash] = field(default_factory=list)

    @property
    def block_hashes(self) -> list[BlockHash]:
        """Digests of the whole prefix, so that equal hashes mean equal prefixes by construction."""
        size = self.hash_block_size
        while (len(self.hashed) + 1) * size <= len(self.token_ids):
            self.hashed.append(
                BlockHash(sha256(repr(self.prefix((len(self.hashed) + 1) * size)).encode()).digest())
            )
        return self.hashed

    def prefix(self, num_tokens: int) -> tuple[str | None, tuple[int, ...]]:
        return self.cache_salt, tuple(self.token_ids[:num_tokens])


class CacheMachine(RuleBasedStateMachine):
    config: KVCacheConfig

    @initialize()
    def start(self) -> None:
        # Shares that nobody passes are least recently used; so is no policy at all.
        policy = TenantShares(self.config.num_blocks) if self.config.verify_tokens else None
        self.real = KVCacheManager(
            self.config, enable_events=True, integer_hashes=False, eviction_policy=policy
        )
        self.plain = PlainKVCache(self.config)
        self.requests: dict[RequestId, StubRequest] = {}
        self.tables: dict[RequestId, tuple[list[BlockId], ...]] = {}
        self.popped: list[tuple[list[BlockId], list[PlainBlock]]] = []
        self.contents: dict[BlockId, object] = {}
        self.num_requests = 0

    @rule(
        shared=st.integers(0, 12),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        salt=st.sampled_from([None, None, None, "s"]),
        skip=st.sampled_from([False, False, False, True]),
    )
    def add(self, shared: int, own: list[int], salt: str | None, skip: bool) -> None:
        if len(self.requests) >= 6:
            return
        self.num_requests += 1
        tokens = [7, 7, 8, 8, 7, 9, 9, 7, 8, 9, 7, 7][:shared] + own
        request_id = RequestId(str(self.num_requests))
        self.requests[request_id] = StubRequest(
            request_id, tokens, len(tokens), self.config.hash_block_size, salt, skip
        )

    def pick(self, data: Any, *, holding: bool) -> StubRequest | None:
        found = [r for r in self.requests.values() if (r.request_id in self.tables) is holding]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data(), chunk=st.integers(1, 12))
    def admit(self, data: Any, chunk: int) -> None:
        request = self.pick(data, holding=False)
        if request is None:
            return
        hit = self.real.lookup(request)
        plain_hit, num_hit_tokens = self.plain.lookup(request)
        assert hit.num_tokens == num_hit_tokens < len(request.token_ids)
        assert [list(blocks) for blocks in hit.blocks] == [[b.number for b in bs] for bs in plain_hit]
        self.check_contents(request, hit.blocks)
        if self.config.track_misses:
            reason = self.real.explain_miss(request, hit)
            assert hit.num_tokens <= reason.token_index < len(request.token_ids) or request.skip_lookup
        num_new = min(chunk, len(request.token_ids) - hit.num_tokens)
        got = self.real.allocate(request, num_new, num_computed_tokens=0, hit=hit, is_admission=True)
        assert got == self.plain.allocate(
            request, num_new, num_computed_tokens=0, hit=plain_hit, num_hit_tokens=num_hit_tokens
        )
        self.allocated(request, got, hit.num_tokens + num_new)

    def check_contents(self, request: StubRequest, tables: Any) -> None:
        """A hit block was filled with exactly this request's prefix."""
        for group, blocks in enumerate(tables):
            size = self.real.config.effective_block_size(self.config.groups[group])
            for place, block_id in enumerate(blocks):
                if block_id:
                    assert self.contents[block_id] == (group, request.prefix((place + 1) * size))

    def allocated(self, request: StubRequest, got: list[list[BlockId]] | None, num_computed: int) -> None:
        if got is None:
            return
        request.num_computed = num_computed
        self.tables[request.request_id] = self.real.block_ids(request.request_id)
        known = min(num_computed, len(request.token_ids))
        for group, table in enumerate(self.tables[request.request_id]):
            size = self.real.config.effective_block_size(self.config.groups[group])
            for place, block_id in enumerate(table):
                if block_id and (place + 1) * size <= known:
                    self.contents[block_id] = (group, request.prefix((place + 1) * size))
                elif block_id:
                    self.contents.pop(block_id, None)

    @rule(data=st.data(), token=st.integers(0, 1), drafts=st.integers(0, 2))
    def step(self, data: Any, token: int, drafts: int) -> None:
        request = self.pick(data, holding=True)
        if request is None:
            return
        if request.num_computed >= len(request.token_ids):
            request.num_computed = len(request.token_ids)
            request.token_ids.append(token)
        num_new = len(request.token_ids) - request.num_computed + drafts
        before = self.real.block_ids(request.request_id)
        got = self.real.allocate(request, num_new, num_computed_tokens=request.num_computed)
        assert got == self.plain.allocate(request, num_new, num_computed_tokens=request.num_computed)
        self.check_growth(before, self.real.block_ids(request.request_id))
        self.allocated(request, got, len(request.token_ids))

    def check_growth(self, before: Any, after: Any) -> None:
        """A running block table only grows, and blocks that left a window become null."""
        for old, new in zip(before, after, strict=True):
            assert len(new) >= len(old)
            assert all(b in (a, 0) for a, b in zip(old, new, strict=False))

    @rule(data=st.data(), why=st.sampled_from(["finish", "preempt"]))
    def free(self, data: Any, why: str) -> None:
        request = self.pick(data, holding=True)
        if request is None:
            return
        self.real.free(request)
        self.plain.free(request)
        self.leave(request, why)

    def leave(self, request: StubRequest, why: str) -> None:
        del self.tables[request.request_id]
        request.num_computed = 0
        if why == "finish":
            del self.requests[request.request_id]
        else:
            request.num_preemptions += 1

    @rule(data=st.data())
    def pop(self, data: Any) -> None:
        request = self.pick(data, holding=True)
        if request is not None and len(self.popped) < 2:
            ids, blocks = self.real.pop_blocks(request), self.plain.pop_blocks(request)
            assert ids == [block.number for block in blocks]
            self.popped.append((ids, blocks))
            self.leave(request, "preempt")

    @precondition(lambda self: self.popped)
    @rule()
    def free_popped(self) -> None:
        ids, blocks = self.popped.pop(0)
        self.real.free_popped(ids)
        self.plain.give_back(reversed(blocks))

    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        ids = data.draw(st.lists(st.integers(1, self.config.num_blocks - 1), max_size=3))
        self.real.evict([BlockId(i) for i in ids])
        self.plain.evict(ids)

    @rule()
    def reset(self) -> None:
        assert self.real.reset() == self.plain.reset()

    @invariant()
    def same_state(self) -> None:
        real, plain = self.real, self.plain
        assert real.free_block_ids() == [block.number for block in plain.queue.values()]
        assert list(real.ref_counts()) == [block.holders for block in plain.blocks]
        for block in plain.blocks:
            entries = [block.own, *sorted(block.additional)] if block.own else []
            assert real.entries_of(BlockId(block.number)) == entries
        assert [as_plain(event) for event in real.take_events()] == plain.events
        plain.events.clear()
        if not self.popped:
            real.check_invariants()

    @invariant()
    def conserved(self) -> None:
        held = sum(1 for count in self.real.ref_counts() if count)
        assert self.real.num_free_blocks + held == self.config.num_blocks - 1
        for request_id, table in self.tables.items():
            assert [len(t) for t in self.real.block_ids(request_id)] == [len(t) for t in table]

    def teardown(self) -> None:
        if not hasattr(self, "real"):
            return
        for request_id in list(self.tables):
            self.real.free(self.requests[request_id])
        for ids, _ in self.popped:
            self.real.free_popped(ids)
        assert self.real.num_free_blocks == self.config.num_blocks - 1
        assert self.real.usage == 0.0
        self.real.check_invariants()
        assert self.real.reset()
        assert self.real.num_collisions == 0


def as_plain(event: KvEvent) -> PlainEvent:
    match event:
        case BlockStored():
            return ("stored", event.group_idx or 0, event.block_hashes)  # type: ignore[return-value]
        case BlockRemoved():
            return ("removed", event.group_idx or 0, event.block_hashes)  # type: ignore[return-value]
    return ("cleared", 0, ())


@pytest.mark.parametrize("name", CONFIGS)
def test_same_as_the_plain_cache(name: str) -> None:
    machine = type("Machine", (CacheMachine,), {"config": CONFIGS[name]})
    machine.TestCase.settings = settings(
        max_examples=40, stateful_step_count=40, deadline=None, print_blob=True
    )
    machine.TestCase().runTest()
