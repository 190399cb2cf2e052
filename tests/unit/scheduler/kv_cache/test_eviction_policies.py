"""Eviction orders that are not the default, and the default through the same suite."""

from collections.abc import Iterator, Sequence

import pytest

from reprise_core.errors import InvalidInput
from reprise_core.ids import BlockHash, BlockId, GroupId
from reprise_scheduler.kv_cache import tenant_shares
from reprise_scheduler.kv_cache.config import GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.eviction import EvictionPolicy, LeastRecentlyUsed
from reprise_scheduler.kv_cache.group import Group
from reprise_scheduler.kv_cache.manager import KVCacheManager
from reprise_scheduler.kv_cache.policy_loading import load_policy
from reprise_scheduler.kv_cache.request import CachedRequest
from reprise_scheduler.kv_cache.tenant_shares import TenantShares
from unit.scheduler.kv_cache.simple_request import SimpleRequest


class FewestHits(EvictionPolicy):
    """Evicts the block that was hit least often; the older one of equals."""

    def __init__(self, num_blocks: int) -> None:
        self.hits: dict[BlockId, int] = {}
        self.members: dict[BlockId, None] = {}

    def hit(self, request: CachedRequest, group: Group, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            self.hits[block_id] = self.hits.get(block_id, 0) + 1

    def removed(self, block_id: BlockId, block_hash: BlockHash, group_id: GroupId) -> None:
        self.hits.pop(block_id, None)

    def add(self, block_ids: Sequence[BlockId]) -> None:
        self.members.update(dict.fromkeys(block_ids))

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            del self.members[block_id]

    def pop(self, num_blocks: int) -> list[BlockId]:
        victims = list(self)[:num_blocks]
        self.remove(victims)
        return victims

    def keeps(self, request: CachedRequest, group: Group, first: int, end: int) -> Sequence[bool] | None:
        return [False] * (end - first) if request.tenant == "batch" else None

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(sorted(self.members, key=lambda block_id: self.hits.get(block_id, 0)))


def make(policy: EvictionPolicy | None, num_blocks: int = 9) -> KVCacheManager:
    config = KVCacheConfig(num_blocks=num_blocks, groups=[GroupSpec(block_size=4)])
    return KVCacheManager(config, eviction_policy=policy)


def run(manager: KVCacheManager, request: SimpleRequest) -> int:
    hit = manager.lookup(request)
    num_new = len(request.token_ids) - hit.num_tokens
    assert manager.allocate(request, num_new, num_computed_tokens=0, hit=hit) is not None
    manager.free(request)
    manager.check_invariants()
    return hit.num_tokens


@pytest.mark.parametrize("make_policy", [LeastRecentlyUsed, FewestHits, TenantShares])
def test_every_policy_keeps_the_pool_whole(make_policy: type[EvictionPolicy]) -> None:
    manager = make(make_policy(9))  # type: ignore[call-arg]
    for number in range(60):
        start = number * 7 % 23
        run(manager, SimpleRequest(f"{number}", [*range(start, start + 5 + number % 20)]))
    assert manager.num_free_blocks == 8
    assert sorted(manager.free_block_ids()) == [*range(1, 9)]
    assert manager.reset()


def test_a_policy_of_ones_own_decides_who_goes() -> None:
    manager = make(FewestHits(9))
    popular = [*range(9)]
    run(manager, SimpleRequest("a", popular))
    assert run(manager, SimpleRequest("b", popular)) == 8
    for number in range(4):
        run(manager, SimpleRequest(f"{number}", [*range(100 * number + 50, 100 * number + 70)]))
    assert run(manager, SimpleRequest("c", popular)) == 8
    # Least recently used would have let it go.
    plain = make(None)
    for tokens in (popular, popular, *([*range(100 * n + 50, 100 * n + 70)] for n in range(4))):
        run(plain, SimpleRequest("x", tokens))
    assert run(plain, SimpleRequest("c", popular)) == 0


def test_a_policy_can_refuse_entries() -> None:
    manager = make(FewestHits(9))
    batch = SimpleRequest("a", [*range(9)], tenant="batch")
    run(manager, batch)
    assert run(manager, SimpleRequest("b", [*range(9)])) == 0


def test_a_tenant_over_its_share_loses_first() -> None:
    manager = make(TenantShares(9, {"big": 0.25}), num_blocks=9)
    run(manager, SimpleRequest("small", [*range(8)], tenant="small"))
    run(manager, SimpleRequest("big", [*range(50, 66)], tenant="big"))
    # Six blocks are cached, two free. Taking four evicts two: "big" has four of its 2.25.
    run(manager, SimpleRequest("other", [*range(80, 96)], tenant="other"))
    assert manager.lookup(SimpleRequest("a", [*range(9)])).num_tokens == 8
    assert manager.lookup(SimpleRequest("b", [*range(50, 67)])).num_tokens == 8


def test_without_shares_it_is_least_recently_used() -> None:
    shared, plain = make(TenantShares(9)), make(None)
    for number in range(40):
        start = number * 5 % 17
        tokens = [*range(start, start + 6 + number % 19)]
        tenant = f"t{number % 3}"
        assert run(shared, SimpleRequest("a", tokens, tenant=tenant)) == run(
            plain, SimpleRequest("b", tokens)
        )
        assert shared.free_block_ids() == plain.free_block_ids()


def test_a_share_must_be_a_part() -> None:
    with pytest.raises(InvalidInput, match=r"tenant share x: 1\.5"):
        TenantShares(9, {"x": 1.5})


def test_loading_by_name() -> None:
    policy = load_policy("reprise_scheduler.kv_cache.tenant_shares:TenantShares", 9)
    assert isinstance(policy, TenantShares)


@pytest.mark.parametrize(
    "name", ["x", "no.such.module:X", "json:Missing", "json:JSONDecoder", "fractions:Fraction"]
)
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="eviction_policy"):
        load_policy(name, 9)


def test_tenants_beyond_the_limit_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_shares, "MAX_TENANTS", 2)
    policy = TenantShares(17, {"vip": 0.5})
    manager = make(policy, num_blocks=17)
    for number in range(4):
        run(manager, SimpleRequest(f"{number}", [*range(number * 10, number * 10 + 4)], tenant=f"t{number}"))
    run(manager, SimpleRequest("v", [*range(90, 94)], tenant="vip"))
    assert policy._num_cached == {"t0": 1, "t1": 1, tenant_shares.OTHERS: 2, "vip": 1}
