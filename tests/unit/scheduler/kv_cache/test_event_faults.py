"""Faults that other engines had in their KV events, and what ours say in the same place."""

from reprise_core.block_record import BlockRecord
from reprise_core.extra_keys import LoraAdapter
from reprise_core.kv_events import BlockRemoved, BlockStored, KvEvent
from reprise_scheduler.kv_cache.config import GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager
from unit.scheduler.kv_cache.simple_request import SimpleRequest


def make(num_blocks: int = 32, *, mark_reports: bool = True) -> KVCacheManager:
    config = KVCacheConfig(num_blocks=num_blocks, groups=[GroupSpec(block_size=4)])
    return KVCacheManager(config, enable_events=True, mark_reports=mark_reports)


def run(manager: KVCacheManager, request: SimpleRequest) -> list[KvEvent]:
    """Admits and ends it; the events of that."""
    hit = manager.lookup(request)
    num_new = len(request.token_ids) - hit.num_tokens
    assert manager.allocate(request, num_new, num_computed_tokens=0, hit=hit, is_admission=True) is not None
    manager.free(request)
    return manager.take_events()


def test_an_event_of_an_adapter_s_request_names_the_adapter() -> None:
    """dynamo#4128: a wrong attribute was read for it, which killed the engine."""
    request = SimpleRequest("a", [*range(10)], lora=LoraAdapter(name="sql", int_id=7, path="/adapters/sql"))
    (event,) = run(make(), request)
    assert isinstance(event, BlockStored)
    assert (event.lora_name, event.lora_id) == ("sql", 7)
    assert event.extra_keys is not None
    assert [keys[0] for keys in event.extra_keys if keys] == ["sql", "sql"]


def test_equal_blocks_have_hashes_of_their_own_each_after_the_one_before() -> None:
    """sglang#13488: repeated tokens referred to themselves, and events came without a change."""
    manager = make()
    (event,) = run(manager, SimpleRequest("a", [5, 6, 7, 8] * 8))
    assert isinstance(event, BlockStored)
    assert len(set(event.block_hashes)) == 8
    assert event.parent_block_hash is None
    # Seven of them are hit, the last one is computed again and has a twin.
    (twin,) = run(manager, SimpleRequest("b", [5, 6, 7, 8] * 8))
    assert isinstance(twin, BlockStored)
    assert (twin.block_hashes, twin.parent_block_hash) == (event.block_hashes[7:], event.block_hashes[6])
    assert run(manager, SimpleRequest("c", [1, 2, 3])) == []


def test_a_report_says_that_it_is_one_and_is_no_copy() -> None:
    """smg#946, llm-d-router#2510: named again five times, and gone after one removal."""
    manager, record = make(num_blocks=6), BlockRecord(limit_blocks=100)
    events = run(manager, SimpleRequest("first", [*range(13)]))
    for number in range(5):
        events += run(manager, SimpleRequest(f"again-{number}", [*range(13)], report_full=True))
    reports = [event for event in events if isinstance(event, BlockStored) and event.report]
    assert [len(report.block_hashes) for report in reports] == [3] * 5
    for event in events:
        record.apply(event)
    assert record.num_blocks == record.num_copies == 3
    gone = run(manager, SimpleRequest("other", [*range(100, 120)]))
    assert sum(isinstance(event, BlockRemoved) for event in gone) == 3
    for event in gone:
        record.apply(event)
    assert record.num_copies == 5
    assert record.num_unknown_removals == 0


def test_without_the_mark_a_report_is_the_reference_s() -> None:
    manager = make(mark_reports=False)
    run(manager, SimpleRequest("first", [*range(13)]))
    report, *_ = run(manager, SimpleRequest("again", [*range(13)], report_full=True))
    assert isinstance(report, BlockStored)
    assert report.report is None
