"""A prompt whose every block is cached computes one token: its last block is copied."""

from reprise_core.ids import BlockId
from reprise_scheduler.kv_cache.config import GroupKind, GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager
from unit.scheduler.kv_cache.simple_request import SimpleRequest

FULL = GroupSpec(block_size=4)
SLIDING = GroupSpec(kind=GroupKind.SLIDING, block_size=4, window=5)


def make(num_blocks: int = 11, groups: tuple[GroupSpec, ...] = (FULL,), on: bool = True) -> KVCacheManager:
    config = KVCacheConfig(num_blocks=num_blocks, groups=groups, full_prompt_hit=on)
    return KVCacheManager(config, enable_events=True)


def start(manager: KVCacheManager, request: SimpleRequest) -> tuple[int, list[list[BlockId]] | None]:
    hit = manager.lookup(request)
    num_new = len(request.token_ids) - hit.num_tokens
    got = manager.allocate(request, num_new, num_computed_tokens=0, hit=hit, is_admission=True)
    manager.check_invariants()
    return hit.num_tokens, got


def test_the_last_block_is_copied_into_a_private_one() -> None:
    manager = make()
    first = SimpleRequest("a", [*range(8)])
    start(manager, first)
    manager.free(first)
    second = SimpleRequest("b", [*range(8)])
    assert start(manager, second) == (7, [[3]])
    assert manager.block_ids(second.request_id) == ([1, 3],)
    assert manager.ref_counts()[1:4] == (1, 1, 1)  # The source is held until the plan is made.
    assert manager.take_copies() == [(0, 2, 3)]
    assert manager.ref_counts()[1:4] == (1, 0, 1)
    assert manager.take_copies() == []
    # The copy is a twin of its source.
    assert manager.block_hash_of(BlockId(3)) == second.block_hashes[1]
    manager.free(second)
    manager.check_invariants()


def test_only_whole_prompts_hit_so() -> None:
    manager = make()
    start(manager, SimpleRequest("a", [*range(8)]))
    assert start(manager, SimpleRequest("b", [*range(7)]))[0] == 4
    assert start(manager, SimpleRequest("c", [*range(4), 50, 51, 52, 53]))[0] == 4
    assert manager.take_copies() == []


def test_the_source_needs_room_while_it_is_held() -> None:
    manager = make(num_blocks=3)
    first = SimpleRequest("a", [*range(8)])
    start(manager, first)
    manager.free(first)
    # Two free blocks: the adopted one and the source leave none to copy into.
    assert start(manager, SimpleRequest("b", [*range(8)])) == (7, None)
    assert manager.num_free_blocks == 2


def test_with_a_window_both_groups_copy() -> None:
    """Token 11 is computed again and reads from token 7 on: a block more than what follows a hit of all 12
    tokens reads."""
    manager = make(num_blocks=16, groups=(FULL, SLIDING))
    first = SimpleRequest("a", [*range(12)])
    start(manager, first)
    manager.free(first)
    second = SimpleRequest("b", [*range(12)])
    num_hit, new_blocks = start(manager, second)
    assert num_hit == 11
    assert new_blocks is not None
    assert [len(blocks) for blocks in new_blocks] == [1, 1]
    copies = manager.take_copies()
    tables = manager.block_ids(second.request_id)
    assert [(copy.group_id, copy.target) for copy in copies] == [(0, tables[0][2]), (1, tables[1][2])]
    assert tables[1][1] != 0
    manager.free(second)
    manager.check_invariants()
    assert manager.num_free_blocks == 15


def test_without_what_the_last_token_reads_it_is_a_plain_hit_or_none() -> None:
    manager = make(num_blocks=16, groups=(FULL, SLIDING))
    first = SimpleRequest("a", [*range(12)])
    start(manager, first)
    before_last = manager.block_ids(first.request_id)[1][1]
    manager.free(first)
    manager.evict([before_last])
    assert start(manager, SimpleRequest("b", [*range(12)]))[0] == 4
    assert manager.take_copies() == []


def test_off_is_the_plain_hit() -> None:
    manager = make(on=False)
    start(manager, SimpleRequest("a", [*range(8)]))
    assert start(manager, SimpleRequest("b", [*range(8)]))[0] == 4
