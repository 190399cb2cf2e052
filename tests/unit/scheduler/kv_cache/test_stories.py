"""The cache manager's life in small stories, with exact block ids and order."""

import pytest

from reprise_core.errors import InvalidInput
from reprise_core.extra_keys import LoraAdapter
from reprise_core.ids import BlockId, RequestId
from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from reprise_scheduler.kv_cache.config import GroupKind, GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager
from reprise_scheduler.kv_cache.request import PrefixHit
from unit.scheduler.kv_cache.simple_request import SimpleRequest


def one_full(num_blocks: int = 11, **settings: object) -> KVCacheManager:
    config = KVCacheConfig(num_blocks=num_blocks, groups=[GroupSpec(block_size=4)], **settings)  # type: ignore[arg-type]
    return KVCacheManager(config, enable_events=True)


def admit(manager: KVCacheManager, request: SimpleRequest) -> tuple[PrefixHit, list[list[BlockId]] | None]:
    hit = manager.lookup(request)
    num_new = len(request.token_ids) - hit.num_tokens
    return hit, manager.allocate(request, num_new, num_computed_tokens=0, hit=hit, is_admission=True)


def test_miss_hit_in_use_free_hit_when_free_evict() -> None:
    manager = one_full()
    first = SimpleRequest("first", [*range(10)])
    assert admit(manager, first) == (PrefixHit(((),), 0), [[1, 2, 3]])

    second = SimpleRequest("second", [*range(8), 50, 51])
    hit, new_blocks = admit(manager, second)
    assert (hit.blocks, hit.num_tokens, new_blocks) == (((1, 2),), 8, [[4]])
    assert manager.ref_counts()[1:5] == (2, 2, 1, 1)

    manager.free(first)
    assert manager.free_block_ids() == [3, 5, 6, 7, 8, 9, 10]
    manager.free(second)
    assert manager.free_block_ids() == [4, 3, 5, 6, 7, 8, 9, 10, 2, 1]

    third = SimpleRequest("third", [*range(9)])
    hit, new_blocks = admit(manager, third)
    assert (hit.blocks, new_blocks) == (((1, 2),), [[4]])
    manager.free(third)

    # Everything unused goes first, then the block that was returned first: the prefix's end.
    assert admit(manager, SimpleRequest("big", [*range(100, 136)]))[1] == [[4, 3, 5, 6, 7, 8, 9, 10, 2]]
    assert manager.block_hash_of(BlockId(1)) == third.block_hashes[0]
    manager.check_invariants()


def test_the_last_token_is_always_computed() -> None:
    manager = one_full()
    admit(manager, SimpleRequest("a", [*range(8)]))
    hit, new_blocks = admit(manager, SimpleRequest("b", [*range(8)]))
    assert (hit.num_tokens, new_blocks) == (4, [[3]])


def test_equal_blocks_stay_apart_and_are_announced_apart() -> None:
    manager = one_full()
    admit(manager, SimpleRequest("a", [*range(4)]))
    admit(manager, SimpleRequest("b", [*range(4)]))
    stored = manager.take_events()
    assert [type(event) for event in stored] == [BlockStored, BlockStored]
    assert manager.lookup(SimpleRequest("c", [*range(5)])).blocks == ((1,),)
    manager.evict([BlockId(1)])
    assert manager.lookup(SimpleRequest("d", [*range(5)])).blocks == ((2,),)
    assert [type(event) for event in manager.take_events()] == [BlockRemoved]


def test_a_refused_allocation_changes_nothing() -> None:
    manager = one_full(num_blocks=4)
    running = SimpleRequest("running", [*range(8)])
    admit(manager, running)
    before = (manager.free_block_ids(), manager.ref_counts(), manager.block_ids(RequestId("running")))
    assert admit(manager, SimpleRequest("late", [*range(50, 58)]))[1] is None
    assert before == (manager.free_block_ids(), manager.ref_counts(), manager.block_ids(RequestId("running")))
    assert manager.block_ids(RequestId("late")) == ([],)


def test_hit_blocks_that_are_free_count_against_the_room() -> None:
    manager = one_full(num_blocks=4)
    first = SimpleRequest("first", [*range(8)])
    admit(manager, first)
    manager.free(first)
    assert manager.num_free_blocks == 3
    # Two free hit blocks and two new ones do not fit into three free blocks.
    assert admit(manager, SimpleRequest("second", [*range(16)]))[1] is None
    assert manager.num_free_blocks == 3


def test_draft_tokens_get_slots_but_no_hash() -> None:
    manager = one_full()
    request = SimpleRequest("a", [*range(6)])
    admit(manager, request)
    request.token_ids.append(6)
    assert manager.allocate(request, 1 + 5, num_computed_tokens=6) == [[3]]
    assert manager.block_hash_of(BlockId(1)) is not None
    assert manager.block_hash_of(BlockId(2)) is None
    request.token_ids.append(7)
    assert manager.allocate(request, 1, num_computed_tokens=7) == [[]]
    assert manager.block_hash_of(BlockId(2)) is not None


def test_skipped_lookup_still_caches_and_is_not_counted() -> None:
    manager = one_full()
    request = SimpleRequest("a", [*range(9)], skip_lookup=True)
    assert admit(manager, request)[0].num_tokens == 0
    assert admit(manager, SimpleRequest("b", [*range(9)], skip_lookup=True))[0].num_tokens == 0
    manager.record_admission(request, 0)
    assert manager.take_stats().requests == 0
    assert admit(manager, SimpleRequest("c", [*range(9)]))[0].num_tokens == 8


def test_counters_keep_preempted_requests_apart() -> None:
    manager = one_full()
    request = SimpleRequest("a", [*range(9)])
    manager.record_admission(request, 4)
    request.num_preemptions = 1
    manager.record_admission(request, 8)
    stats = manager.take_stats()
    assert (stats.requests, stats.queries, stats.hits) == (1, 9, 4)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 9, 8)
    assert manager.take_stats().requests == 0


def test_reset_waits_for_the_last_holder() -> None:
    manager = one_full()
    request = SimpleRequest("a", [*range(8)])
    admit(manager, request)
    assert not manager.reset()
    manager.free(request)
    manager.take_events()
    assert manager.reset()
    assert manager.take_events() == [AllBlocksCleared()]
    assert manager.take_stats().reset
    assert manager.lookup(request).num_tokens == 0
    assert manager.block_hash_of(BlockId(1)) is None


def test_popped_blocks_stay_held_until_they_are_returned() -> None:
    manager = one_full(num_blocks=6)
    request = SimpleRequest("a", [*range(10)])
    admit(manager, request)
    ids = manager.pop_blocks(request)
    assert (ids, manager.num_free_blocks) == ([1, 2, 3], 2)
    assert admit(manager, SimpleRequest("b", [*range(50, 62)]))[1] is None
    manager.free_popped(ids)
    assert manager.free_block_ids() == [3, 4, 5, 2, 1]


def test_a_delayed_load_is_cached_when_it_is_done() -> None:
    manager = one_full()
    request = SimpleRequest("a", [*range(10)])
    new_blocks = manager.allocate(
        request, 0, num_computed_tokens=0, num_external_tokens=8, delay_caching=True, is_admission=True
    )
    assert new_blocks == [[]]
    assert manager.block_ids(request.request_id) == ([1, 2],)
    assert manager.lookup(SimpleRequest("b", [*range(10)])).num_tokens == 0
    manager.cache_blocks(request, 4)  # Only the first block came through.
    assert manager.lookup(SimpleRequest("c", [*range(10)])).num_tokens == 4


def test_watermark_and_reserve_leave_blocks_free() -> None:
    manager = one_full(num_blocks=11, watermark=0.2)
    request = SimpleRequest("a", [*range(36)])
    assert (
        manager.allocate(request, 36, num_computed_tokens=0, is_admission=True, others_running=True) is None
    )
    assert manager.allocate(request, 36, num_computed_tokens=0, reserved_blocks=2) is None
    assert manager.allocate(request, 36, num_computed_tokens=0, is_admission=True) is not None


def test_a_window_lets_go_of_what_it_has_passed() -> None:
    spec = GroupSpec(kind=GroupKind.SLIDING, block_size=4, window=5)
    manager = KVCacheManager(KVCacheConfig(num_blocks=11, groups=[spec]))
    request = SimpleRequest("a", [*range(12)])
    admit(manager, request)
    manager.trim(request, 12)
    assert manager.block_ids(request.request_id) == ([0, 0, 3],)
    assert manager.free_block_ids()[-2:] == [2, 1]
    # The last run of blocks that covers a window is hit; what it does not need is null.
    hit = manager.lookup(SimpleRequest("b", [*range(12), 99]))
    assert (hit.blocks, hit.num_tokens) == (((0, 0, 3),), 12)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lora": LoraAdapter("X", 1, "/a")}, {"cache_salt": "X"}),
        ({"cache_salt": "\u00e9"}, {"cache_salt": "e\u0301"}),
        ({"cache_salt": "s"}, {}),
    ],
)
def test_unlike_namespaces_never_share(one: dict[str, object], other: dict[str, object]) -> None:
    manager = one_full()
    admit(manager, SimpleRequest("a", [*range(9)], **one))  # type: ignore[arg-type]
    assert admit(manager, SimpleRequest("b", [*range(9)], **other))[0].num_tokens == 0  # type: ignore[arg-type]


def test_events_can_carry_whole_hashes() -> None:
    config = KVCacheConfig(num_blocks=5, groups=[GroupSpec(block_size=4)])
    manager = KVCacheManager(config, enable_events=True, integer_hashes=False)
    request = SimpleRequest("a", [*range(4)])
    admit(manager, request)
    (event,) = manager.take_events()
    assert isinstance(event, BlockStored)
    assert event.block_hashes == (request.block_hashes[0],)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("num_blocks", {"num_blocks": 1}),
        ("watermark", {"watermark": 1.5}),
        ("groups", {"groups": []}),
        ("hash_block_size", {"hash_block_size": 3}),
        ("scheduler_block_size", {"scheduler_block_size": 24}),
        ("retention_interval", {"retention_interval": 5}),
        ("dcp_world_size", {"dcp_world_size": 0}),
        ("max_model_len", {"max_model_len": 0}),
    ],
)
def test_a_bad_setting_is_named(field: str, settings: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=field):
        KVCacheConfig(**{"num_blocks": 10, "groups": [GroupSpec(block_size=16)], **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("block_size", {"block_size": 0}),
        ("window", {"kind": GroupKind.SLIDING}),
        ("window", {"window": 8}),
        ("chunk", {"kind": GroupKind.CHUNKED, "chunk": 0}),
    ],
)
def test_a_bad_group_is_named(field: str, settings: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=field):
        GroupSpec(**settings)  # type: ignore[arg-type]
