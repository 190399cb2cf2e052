"""`reprise bench events` end to end, too short to say anything about speed."""

from reprise_cli.bench.event_batches import SHAPES, step_batches
from reprise_cli.bench.events import events_rows
from reprise_core.block_record import BlockRecord
from reprise_core.kv_events import BlockStored


def test_the_rows_that_are_promised() -> None:
    rows = events_rows(cases=[("full", 0, 10), ("decode", 2, 50)], repeats=1, snapshot_blocks=2000)
    cases = [(row.case, row.unit) for row in rows]
    assert cases == [
        ("publish 0 subscribers", "events/s"),
        ("publish 0 subscribers", "bytes/s"),
        ("publish 2 subscribers, decode steps", "events/s"),
        ("publish 2 subscribers, decode steps", "bytes/s"),
        ("record after a burst", "blocks/s"),
        ("snapshot 2000 blocks", "s"),
        ("snapshot 2000 blocks", "blocks/s"),
        ("gRPC snapshot 2000 blocks", "s"),
        ("gRPC snapshot 2000 blocks", "blocks/s"),
    ]
    assert all(row.value > 0 for row in rows)
    assert all(row.ratio for row in rows if row.peer)


def test_steps_are_what_a_cache_could_say() -> None:
    shape, record = SHAPES["full"], BlockRecord(limit_blocks=100_000)
    for batch in step_batches(shape, 100):
        stored = sum(len(event.block_hashes) for event in batch.events if isinstance(event, BlockStored))
        assert stored == shape.num_blocks == 128
        for event in batch.events:
            record.apply(event)
    assert record.num_unknown_removals == 0
    assert 7200 <= record.num_blocks <= 7200 + shape.num_blocks
