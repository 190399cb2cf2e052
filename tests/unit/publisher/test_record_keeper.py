"""Recording after publishing: order, limits, and what listeners are told."""

from typing import Any

from prometheus_client import CollectorRegistry

from reprise_core.block_record import BlockRecord
from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from reprise_publisher.metrics import PublisherMetrics
from reprise_publisher.outgoing import Outgoing, OutgoingOptions
from reprise_publisher.record_keeper import SLICE_BYTES, RecordKeeper
from reprise_wire.event_codec import encode_batch


def stored(*block_hashes: int, parent: int | None = None, **changes: Any) -> BlockStored:
    fields: dict[str, Any] = {
        "block_hashes": block_hashes,
        "parent_block_hash": parent,
        "token_ids": tuple(token for block_hash in block_hashes for token in (block_hash, block_hash + 1)),
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
    }
    return BlockStored(**{**fields, **changes})


def bare(*block_hashes: int, **changes: Any) -> BlockStored:
    """As a store in another tier comes."""
    return stored(*block_hashes, token_ids=(), medium="CPU", **changes)


class Keeper(RecordKeeper):
    """With a listener, whose batches are in `told`."""

    def __init__(self, limit_bytes: int = 10**6, options: OutgoingOptions | None = None) -> None:
        self.registry = CollectorRegistry()
        self.now_s = 0.0
        super().__init__(
            BlockRecord(limit_blocks=1000),
            Outgoing(options or OutgoingOptions()),
            rank=3,
            limit_bytes=limit_bytes,
            metrics=PublisherMetrics(self.registry),
            clock=lambda: self.now_s,
        )
        self.told: list[tuple[int, KvEventBatch]] = []
        self.listen(lambda sequence, payload, batch: self.told.append((sequence, batch)))
        self.next_sequence = 0

    def publish(self, *events: KvEvent) -> None:
        payload = encode_batch(KvEventBatch(1.0, events))
        self.add(self.next_sequence, payload, payload)
        self.next_sequence += 1

    @property
    def events(self) -> list[KvEvent]:
        return [event for _, batch in self.told for event in batch.events]


def test_batches_wait_and_are_recorded_in_order() -> None:
    keeper = Keeper()
    keeper.publish(stored(1))
    keeper.publish(stored(2, parent=1), BlockRemoved(block_hashes=(1,), medium="GPU", group_idx=0))
    assert (keeper.record.num_blocks, keeper.is_behind) == (0, True)
    keeper.catch_up()
    assert (keeper.record.num_blocks, keeper.is_behind, keeper.num_waiting_bytes) == (1, False, 0)
    assert [sequence for sequence, _ in keeper.told] == [0, 1]
    assert all(batch.data_parallel_rank == 3 for _, batch in keeper.told)
    assert keeper.sequence == 1


def test_a_slice_is_bounded_and_the_lag_shows() -> None:
    keeper = Keeper()
    for number in range(400):
        keeper.publish(stored(number, token_ids=(70_000, 70_000)))
        keeper.now_s += 1.0
    before = keeper.num_waiting_bytes
    assert before > 2 * SLICE_BYTES
    assert keeper.lag_s(keeper.now_s) == 400.0
    keeper.advance()
    assert 0 < before - keeper.num_waiting_bytes < SLICE_BYTES + 200
    keeper.catch_up()
    assert keeper.lag_s(keeper.now_s) == 0.0
    assert keeper.record.num_blocks == 400


def test_at_the_limit_the_oldest_are_recorded_first() -> None:
    keeper = Keeper(limit_bytes=1000)
    for number in range(100):
        keeper.publish(stored(number))
        assert keeper.num_waiting_bytes <= 1000
    assert 80 < keeper.record.num_blocks < 100


def test_what_is_void_is_not_recorded() -> None:
    keeper = Keeper()
    keeper.publish(stored(1))
    keeper.forget_waiting()
    keeper.publish(AllBlocksCleared())
    keeper.catch_up()
    assert keeper.record.num_blocks == 0
    assert [sequence for sequence, _ in keeper.told] == [1]


def test_a_clear_that_waits_says_nothing_of_what_was_learned_after_it() -> None:
    keeper = Keeper()
    keeper.publish(AllBlocksCleared())
    keeper.set_knows_all(False, since=keeper.next_sequence)
    keeper.catch_up()
    assert not keeper.knows_all
    keeper.publish(AllBlocksCleared())
    keeper.catch_up()
    assert keeper.knows_all


def test_what_is_no_batch_is_counted_and_the_rest_goes_on() -> None:
    keeper = Keeper()
    keeper.add(0, b"\x93bad", b"\x93bad")
    keeper.next_sequence = 1
    keeper.publish(stored(1))
    keeper.catch_up()
    assert not keeper.knows_all
    assert keeper.record.num_blocks == 1
    labels = {"socket": "intake"}
    assert keeper.registry.get_sample_value("reprise_publisher_malformed_total", labels) == 1


def test_a_store_without_tokens_gets_those_of_the_record() -> None:
    keeper = Keeper()
    keeper.publish(stored(1, 2, extra_keys=(("salt",), None)), stored(3))
    keeper.publish(bare(2, 3, 1))
    keeper.catch_up()
    assert keeper.events[2:] == [
        stored(2, parent=1, medium="CPU"),
        stored(3, medium="CPU"),
        stored(1, medium="CPU", extra_keys=(("salt",),)),
    ]


def test_a_store_of_what_nobody_told_stays_without() -> None:
    keeper = Keeper()
    keeper.publish(bare(5))
    keeper.catch_up()
    assert keeper.events == [bare(5)]


def test_a_block_whose_parent_is_gone_is_not_told_as_a_chains_start() -> None:
    keeper = Keeper()
    keeper.publish(stored(1, 2), BlockRemoved(block_hashes=(1,), medium="GPU", group_idx=0), bare(2))
    keeper.catch_up()
    assert keeper.events[-1] == bare(2)


def test_reports_tell_only_what_is_new() -> None:
    keeper = Keeper()
    keeper.publish(stored(1, 2))
    keeper.publish(stored(1, 2, 3, report=True))
    keeper.publish(stored(1, 2, 3, report=True))
    keeper.catch_up()
    assert keeper.events == [stored(1, 2), stored(3, parent=2)]
    assert keeper.record.copies(1, 0, "GPU") == 1


def test_listeners_get_what_may_leave_and_the_record_has_all() -> None:
    keeper = Keeper(options=OutgoingOptions(token_ids=False))
    keeper.publish(stored(1))
    keeper.catch_up()
    assert keeper.events == [stored(1, token_ids=())]
    content = keeper.record.content(1, 0)
    assert content is not None
    assert content.token_ids == (1, 2)
    keeper.unlisten(keeper._listeners[0])
    keeper.publish(stored(2))
    keeper.catch_up()
    assert len(keeper.events) == 1
