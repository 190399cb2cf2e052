"""What of the store's blocks a hybrid model can use, how they are loaded, and what a failure leaves."""

import random

import pytest

from reprise_core.errors import FailedPrecondition, InvalidInput
from reprise_core.ids import GroupId
from reprise_core.models import KvGroup
from reprise_core.steps import LoadReport, unpack_ids
from reprise_scheduler.engine_loop import _group_spec
from reprise_scheduler.kv_cache.config import GroupKind, GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.group import Group, most_tokens
from reprise_scheduler.sched.config import LoadFailurePolicy, SchedulerConfig
from reprise_scheduler.sched.request import RequestStatus
from reprise_scheduler.sched.scheduler import Scheduler
from reprise_scheduler.sched.stored_blocks import LoadRanges, StoredBlocks
from reprise_scheduler.store_lookup import MAX_BACKWARDS
from support.sched_driver import Driver
from support.sim_worker import SimStore, expected_output, store_name

SIZE = 4
FULL = GroupSpec(block_size=SIZE)
SLIDING = GroupSpec(kind=GroupKind.SLIDING, block_size=SIZE, window=9)
"""Reads the 2 blocks before the next one."""
WIDE = GroupSpec(kind=GroupKind.SLIDING, block_size=SIZE, window=18)


def make_groups(*specs: GroupSpec) -> list[Group]:
    config = KVCacheConfig(num_blocks=100, groups=specs)
    return [Group(GroupId(number), spec, config) for number, spec in enumerate(specs)]


# -- what the store has ---------------------------------------------------------------------------


def store_of(*present: set[int]) -> tuple[SimStore, list[bytes]]:
    """A store that has these blocks of each group, and the hashes of 12 blocks."""
    hashes = [bytes([index]) * 32 for index in range(12)]
    names = {store_name(group, hashes[index]) for group, has in enumerate(present) for index in has}
    return SimStore(blocks={name: [0] * SIZE for name in names}), hashes


def found(present: list[set[int]], *specs: GroupSpec, first: int = 0, limit: int = 12) -> int:
    store, hashes = store_of(*present)
    groups = make_groups(*specs)
    return LoadRanges(groups, SIZE).end(store.stored(groups, hashes), first=first, limit=limit)


ALL = set(range(12))


@pytest.mark.parametrize(
    ("full", "sliding", "end"),
    [
        (ALL, ALL, 12),
        (ALL, {10, 11}, 12),  # before the window nothing is needed
        (ALL, {11}, 0),
        (ALL - {8}, {6, 7}, 8),
        (ALL - {8}, {10, 11}, 0),
        (ALL, ALL - {11}, 11),
        (ALL, ALL - {10}, 10),
        (ALL, {0, 1}, 2),
        (ALL, {0}, 1),  # a short prefix needs no whole window
        (ALL, set(), 0),
        (set(), ALL, 0),
    ],
)
def test_a_hit_ends_where_every_group_has_what_is_read_next(
    full: set[int], sliding: set[int], end: int
) -> None:
    assert found([full, sliding], FULL, SLIDING) == end
    assert found([sliding, full], SLIDING, FULL) == end


def test_the_local_hit_has_what_is_before_it() -> None:
    assert found([ALL, {8, 9}], FULL, SLIDING, first=8) == 10
    assert found([ALL, {10}], FULL, SLIDING, first=10) == 11, "block 9 is in the local hit"
    assert found([ALL, {10}], FULL, SLIDING, first=9) == 9
    assert found([ALL, ALL], FULL, SLIDING, first=5, limit=9) == 9


def test_windows_alone_need_no_block_from_the_front() -> None:
    assert found([{10, 11}], SLIDING) == 12
    assert found([{8, 9}], SLIDING) == 10


def test_a_store_with_many_gaps_is_asked_a_few_times_only() -> None:
    assert MAX_BACKWARDS == 3
    gaps = {1, 3, 4, 5, 7, 9, 11}  # backwards from 11, 9 and 7 nothing is found; block 0 is not there
    assert found([ALL, gaps], FULL, SLIDING) == 0
    assert found([ALL, gaps | {0}], FULL, SLIDING) == 2, "from the front"
    assert found([ALL, gaps - {11} | {8}], FULL, SLIDING) == 10


@pytest.mark.parametrize("seed", range(200))
def test_no_block_that_is_read_after_a_hit_is_missing(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    specs = rng.choice([(FULL, SLIDING), (SLIDING, WIDE, FULL), (FULL, WIDE, WIDE), (SLIDING,), (FULL, FULL)])
    present = [{index for index in range(12) if rng.random() < rng.choice([0.5, 0.9, 1.0])} for _ in specs]
    first, limit = rng.choice([0, 0, 3]), rng.choice([12, 12, 7])
    groups = make_groups(*specs)
    ranges = LoadRanges(groups, SIZE)
    failed = {index for index in range(12) if rng.random() < 0.05}
    store, hashes = store_of(*present)
    end = ranges.end(store.stored(groups, hashes), first=first, limit=limit, failed=failed)

    def valid(end: int) -> bool:
        reads = [range(max(first, ranges.first_read(group, end)), end) for group in groups]
        return all(
            set(read) <= has and not failed & set(read) for read, has in zip(reads, present, strict=True)
        )

    assert first <= end <= max(first, limit)
    assert valid(end)
    count = sum(len(range(max(first, ranges.first_read(group, end)), end)) for group in groups)
    assert ranges.num_blocks(first, end) == count
    for max_blocks in (0, 1, 5, 100):
        within = ranges.end_within(first, end, max_blocks)
        assert ranges.num_blocks(first, within) <= max_blocks
        assert within == end or ranges.num_blocks(first, within + 1) > max_blocks


def test_a_block_counts_as_the_slowest_tier_that_it_is_loaded_from() -> None:
    ranges = LoadRanges(make_groups(FULL, SLIDING), SIZE)
    stored = StoredBlocks((("host",) * 4, ("external", "disk", "disk", "host")))
    assert ranges.tiers(stored, 0, 4) == ["host", "host", "disk", "host"]
    # Before every window nothing is loaded.
    windows = LoadRanges(make_groups(SLIDING), SIZE)
    assert windows.tiers(StoredBlocks((("", "", "disk", "host"),)), 0, 4) == ["disk", "disk", "disk", "host"]


# -- loads ----------------------------------------------------------------------------------------


def stored_driver(prompt: list[int], **config: object) -> Driver:
    """The prompt's blocks are in the store, of both groups, and no longer on the device."""
    driver = Driver(
        connector=True, groups=(FULL, SLIDING), num_blocks=200, max_num_batched_tokens=4096, **config
    )
    driver.scheduler.connector.set_generation(driver.store.generation)
    driver.add("stored", prompt, max_tokens=1)
    driver.run()
    assert driver.scheduler.reset_prefix_cache(preempt_running=False)
    driver.hold_loads = True
    return driver


PROMPT = [5 + i % 40 for i in range(8 * SIZE + 1)]


def test_only_the_windows_blocks_are_loaded_and_the_load_ends_with_its_last_group() -> None:
    driver = stored_driver(PROMPT)
    assert len(driver.store.blocks) == 16, "blocks that left the window were saved, too"
    request = driver.add("b", PROMPT)
    driver.step()
    loads = list(driver.worker.loads)
    assert [(load.group_id, len(unpack_ids(load.block_ids))) for load in loads] == [(0, 8), (1, 2)]
    assert driver.scheduler.gate.num_loading_blocks == 10
    for load in reversed(loads):
        assert request.status is RequestStatus.LOADING
        assert driver.scheduler.end_load([driver.worker.end_load(load, lambda: False)], now_s=0.0) == []
    assert request.status is RequestStatus.WAITING
    assert request.num_computed_tokens == 32
    driver.run()
    assert driver.outputs["b"] == expected_output(PROMPT, 4)
    assert request.prompt_sources is not None
    assert request.prompt_sources.external == 32


def test_a_group_that_reports_twice_or_was_not_asked_ends_nothing() -> None:
    driver = stored_driver(PROMPT)
    request = driver.add("b", PROMPT)
    driver.step()
    full, sliding = driver.worker.loads
    report = driver.worker.end_load(full, lambda: False)
    driver.scheduler.end_load([report, report, LoadReport(report.handle, 7)], now_s=0.0)
    assert request.status is RequestStatus.LOADING
    driver.scheduler.end_load([driver.worker.end_load(sliding, lambda: False)], now_s=0.0)
    assert request.num_computed_tokens == 32


@pytest.mark.parametrize("group_id", [0, 1])
def test_a_failed_block_cuts_all_groups_to_where_all_are_valid(group_id: int) -> None:
    """Block 6 fails in one group. A hit of 6 blocks needs blocks 4 and 5 of the window, which the first load
    did not bring: the request is looked up again, and loads those."""
    driver = stored_driver(PROMPT)
    request = driver.add("b", PROMPT)
    driver.step()
    for load in list(driver.worker.loads):
        bad = unpack_ids(load.block_ids).index(driver.scheduler.manager.block_ids("b")[load.group_id][6])
        fails = iter(number == bad and load.group_id == group_id for number in range(8))
        driver.scheduler.end_load([driver.worker.end_load(load, lambda fails=fails: next(fails))], now_s=0.0)
    assert request.status is RequestStatus.PREEMPTED
    assert driver.scheduler.manager.usage == 0.0
    driver.step()
    driver.step()
    assert [len(unpack_ids(load.block_ids)) for load in driver.worker.loads] == [6, 2]
    driver.hold_loads = False
    driver.end_loads()
    assert request.num_computed_tokens == 24
    driver.run()
    assert driver.outputs["b"] == expected_output(PROMPT, 4)
    assert driver.scheduler.counters.load_failures == 1


def test_a_short_load_within_the_first_window_is_cut_in_place() -> None:
    prompt = PROMPT[: 2 * SIZE + 1]
    driver = stored_driver(prompt)
    request = driver.add("b", prompt)
    driver.step()
    for load in list(driver.worker.loads):
        fails = iter([False, load.group_id == 1])
        driver.scheduler.end_load([driver.worker.end_load(load, lambda fails=fails: next(fails))], now_s=0.0)
    assert (request.status, request.num_computed_tokens) == (RequestStatus.WAITING, 4)
    driver.run()
    assert driver.outputs["b"] == expected_output(prompt, 4)


def test_the_failure_policy_ends_the_request_whichever_group_failed() -> None:
    driver = stored_driver(PROMPT, load_failure_policy=LoadFailurePolicy.FAIL)
    driver.add("b", PROMPT)
    driver.step()
    full, sliding = driver.worker.loads
    reports = [driver.worker.end_load(full, lambda: False), driver.worker.end_load(sliding, lambda: True)]
    (output,) = driver.scheduler.end_load(reports, now_s=0.0)
    assert "2 external blocks could not be loaded" in output.error
    assert driver.scheduler.manager.usage == 0.0


def test_a_block_that_another_group_has_taken_is_not_saved_as_the_first_ones() -> None:
    """Equal prefixes have equal hashes in every group, but not equal contents."""
    driver = stored_driver(PROMPT)
    for name, content in driver.store.blocks.items():
        twin = name[:32]
        assert (content == driver.store.blocks[twin]) is (name == twin)


# -- what is held ---------------------------------------------------------------------------------


def test_blocks_before_the_window_are_given_back_while_a_prompt_is_computed() -> None:
    driver = Driver(groups=(FULL, SLIDING), num_blocks=60, max_num_batched_tokens=8)
    prompt = [5 + i % 40 for i in range(100)]
    request = driver.add("a", prompt, max_tokens=30)
    while driver.scheduler.unfinished():
        driver.step()
        if not request.finished:
            full, sliding = (
                sum(map(bool, table)) for table in driver.scheduler.manager.block_ids(request.request_id)
            )
            assert full == -(-request.num_computed_tokens // SIZE)
            assert sliding <= (8 + 8) // SIZE + 1
    assert driver.outputs["a"] == expected_output(prompt, 30)


def test_the_pool_bounds_the_context_by_what_all_groups_hold() -> None:
    full, sliding = make_groups(FULL, FULL), make_groups(FULL, SLIDING)
    assert most_tokens(full[:1], 10, limit_tokens=1000) == 40
    assert most_tokens(full, 10, limit_tokens=1000) == 20
    assert most_tokens(full, 10, limit_tokens=15) == 15
    # Unbounded in flight: a window is no less than all.
    assert most_tokens(sliding, 10, limit_tokens=1000) == 20
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=4), KVCacheConfig(num_blocks=31, groups=(FULL, SLIDING))
    )
    # 30 blocks: at most 3 + 1 + 2 for the window.
    assert scheduler.config.max_model_len == 24 * SIZE
    with pytest.raises(InvalidInput, match="1 blocks are too few for 2 groups"):
        Scheduler(SchedulerConfig(), KVCacheConfig(num_blocks=2, groups=(FULL, SLIDING)))


# -- what a worker may ask for --------------------------------------------------------------------


def test_groups_of_a_worker_are_checked() -> None:
    window = KvGroup(kind="sliding_window", block_size=16, num_layers=4, window_tokens=128)
    assert _group_spec(window, 16) == GroupSpec(kind=GroupKind.SLIDING, block_size=16, window=128)
    full = KvGroup(kind="full_attention", block_size=16, num_layers=4)
    assert _group_spec(full, 16) == GroupSpec(block_size=16)
    for bad in (
        KvGroup(kind="mamba", block_size=16, num_layers=4),
        KvGroup(kind="full_attention", block_size=8, num_layers=4),
        KvGroup(kind="sliding_window", block_size=16, num_layers=4),
        KvGroup(kind="sliding_window", block_size=16, num_layers=4, window_tokens=1),
    ):
        with pytest.raises(FailedPrecondition, match=f"kind {bad.kind}, {bad.block_size} tokens"):
            _group_spec(bad, 16)
