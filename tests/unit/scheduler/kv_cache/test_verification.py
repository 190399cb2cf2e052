"""Tokens are compared on a hit, so that a colliding hash never gives another prompt's blocks."""

from reprise_core.ids import BlockHash
from reprise_scheduler.kv_cache.config import GroupKind, GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager
from unit.scheduler.kv_cache.simple_request import SimpleRequest


def make(*, verify: bool = True, groups: list[GroupSpec] | None = None) -> KVCacheManager:
    groups = groups or [GroupSpec(block_size=4)]
    return KVCacheManager(KVCacheConfig(num_blocks=31, groups=groups, verify_tokens=verify))


def run(manager: KVCacheManager, request: SimpleRequest) -> int:
    hit = manager.lookup(request)
    num_new = len(request.token_ids) - hit.num_tokens
    assert manager.allocate(request, num_new, num_computed_tokens=0, hit=hit) is not None
    manager.free(request)
    return hit.num_tokens


def with_hashes_of(request: SimpleRequest, other: SimpleRequest) -> SimpleRequest:
    """The test hash: blocks of unlike tokens get the same digest."""
    request.hashed = [BlockHash(h) for h in other.block_hashes]
    return request


def test_a_collision_is_a_miss_and_is_counted() -> None:
    manager = make()
    stored = SimpleRequest("stored", [*range(12)])
    assert run(manager, stored) == 0
    assert run(manager, with_hashes_of(SimpleRequest("forged", [*range(50, 62)]), stored)) == 0
    assert manager.num_collisions == 1
    # The honest prompt still hits its own blocks, which are the older holders.
    assert run(manager, SimpleRequest("honest", [*range(12)])) == 8
    manager.check_invariants()


def test_the_hit_ends_before_the_colliding_block() -> None:
    manager = make()
    stored = SimpleRequest("stored", [*range(12), 99])
    run(manager, stored)
    assert run(manager, with_hashes_of(SimpleRequest("b", [*range(8), 60, 61, 62, 63, 64]), stored)) == 8
    assert manager.num_collisions == 1


def test_another_namespace_with_the_same_hash_is_a_collision() -> None:
    manager = make()
    stored = SimpleRequest("stored", [*range(12)], cache_salt="one")
    run(manager, stored)
    assert run(manager, with_hashes_of(SimpleRequest("b", [*range(12)], cache_salt="two"), stored)) == 0
    assert manager.num_collisions == 1


def test_several_groups_are_all_compared() -> None:
    sliding = GroupSpec(kind=GroupKind.SLIDING, block_size=4, window=5)
    manager = make(groups=[GroupSpec(block_size=4), sliding])
    stored = SimpleRequest("stored", [*range(13)])
    run(manager, stored)
    forged = with_hashes_of(SimpleRequest("b", [*range(8), 60, 61, 62, 63, 64]), stored)
    assert run(manager, forged) == 8
    assert manager.num_collisions == 2  # One in each group.


def test_without_verification_the_hash_alone_decides() -> None:
    manager = make(verify=False)
    stored = SimpleRequest("stored", [*range(12)])
    run(manager, stored)
    assert run(manager, with_hashes_of(SimpleRequest("forged", [*range(50, 62)]), stored)) == 8
    assert manager.num_collisions == 0


def test_equal_hashes_within_one_prompt_keep_the_index_whole() -> None:
    manager = make()
    twice = SimpleRequest("twice", [*range(12)])
    twice.hashed = [twice.block_hashes[0]] * 3
    run(manager, twice)
    manager.check_invariants()
    assert run(manager, SimpleRequest("b", [*range(12)])) == 4
