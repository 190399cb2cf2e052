"""Following one source, story by story."""

import random
from itertools import pairwise

import msgspec
import pytest

from reprise_core.errors import InvalidInput
from reprise_core.kv_events import AllBlocksCleared, KvEventBatch
from reprise_wire.event_codec import PublishedBatch, encode_batch
from reprise_wire.event_source_values import AskKind, DeliveryKind, SourceOptions, SourceState
from support.event_world import EventWorld, stored

LIVE, REPLAY, SNAPSHOT = DeliveryKind.LIVE, DeliveryKind.REPLAY, DeliveryKind.SNAPSHOT


def make_world(**options: object) -> EventWorld:
    return EventWorld(random.Random(1), **options)  # type: ignore[arg-type]


def kinds(world: EventWorld) -> list[tuple[DeliveryKind, int]]:
    return [(delivery.kind, delivery.sequence) for delivery in world.deliveries]


def publish(world: EventWorld, *hashes: int, lost: bool = False) -> None:
    for block_hash in hashes:
        world.publish(stored(block_hash, None), lost=lost)


def join(world: EventWorld) -> int:
    """Exact, and the live connection proven; the last sequence."""
    world.connect()
    world.settle()
    for block_hash in (1001, 1002):
        publish(world, block_hash)
        world.arrive(1)
        world.answer(100)
    assert kinds(world)[-1][0] is LIVE
    assert world.source.sequence is not None
    return world.source.sequence


def test_a_publisher_that_is_followed_from_its_start_is_exact_at_once() -> None:
    world = make_world(clears=False)
    world.connect()
    assert world.source.state is SourceState.OFF
    publish(world, 1, 2)
    world.arrive(2)
    assert kinds(world) == [(LIVE, 0), (LIVE, 1)]
    assert world.source.state is SourceState.EXACT
    assert world.source.sequence == 1


def test_stream_and_snapshot_give_each_block_once() -> None:
    world = make_world()
    publish(world, 1, 2, 3)
    world.connect()
    assert world.source.ask is not None
    assert world.source.ask.kind is AskKind.SNAPSHOT
    publish(world, 4)
    world.arrive(1)
    publish(world, 5)
    world.answer(100)
    publish(world, 6)
    assert world.source.state is SourceState.EXACT
    world.arrive(10)
    world.answer(100)
    # The first live batch after a snapshot is compared with a replayed one; from then on they pass.
    publish(world, 7)
    world.arrive(10)
    assert set(kinds(world)) == {(SNAPSHOT, 5), (REPLAY, 6), (LIVE, 7)}
    assert world.copies() == world.publisher.truth
    assert max(world.copies().values()) == 1
    assert world.source.counters.duplicates == 3


def test_an_idle_publisher_is_known_again_though_its_heartbeats_are_kept_as_one() -> None:
    world = make_world()
    last = join(world)
    for _ in range(5):
        world.publish()
        world.arrive(1)
    world.disconnect()
    assert world.source.state is SourceState.PARTIAL
    world.publish()
    world.connect()
    assert world.source.ask is not None
    assert (world.source.ask.kind, world.source.ask.start) == (AskKind.REPLAY, last)
    world.answer(100)
    assert world.source.state is SourceState.EXACT
    for _ in range(3):
        world.publish()
        world.arrive(1)
        world.answer(100)
    assert world.source.counters.restarts == 0
    assert world.source.live_epoch == 0
    assert world.source.sequence == last + 9


def test_a_gap_is_replayed_from_one_batch_before_it() -> None:
    world = make_world()
    last = join(world)
    publish(world, 1, 2, lost=True)
    publish(world, 3)
    world.arrive(1)
    assert world.source.state is SourceState.PARTIAL
    assert world.source.ask is not None
    assert (world.source.ask.kind, world.source.ask.start) == (AskKind.REPLAY, last)
    world.answer(100)
    assert world.source.state is SourceState.EXACT
    assert kinds(world)[-3:] == [(REPLAY, last + 1), (REPLAY, last + 2), (REPLAY, last + 3)]
    assert world.source.counters.gaps == 1


def test_a_gap_that_the_ring_has_lost_takes_a_snapshot() -> None:
    world = make_world(ring_batches=2)
    join(world)
    publish(world, *range(10), lost=True)
    publish(world, 99)
    world.arrive(1)
    world.answer(1)
    assert world.source.ask is not None
    assert world.source.ask.kind is AskKind.SNAPSHOT
    world.settle()
    assert world.copies() == world.publisher.truth


def test_without_snapshots_such_a_gap_is_partial_until_cleared() -> None:
    world = make_world(ring_batches=2, snapshots=False)
    world.connect()
    world.settle()
    publish(world, *range(10), lost=True)
    publish(world, 99)
    for _ in range(10):
        world.arrive(10)
        world.answer(10)
        world.pass_time(1.1)
    assert world.source.state is SourceState.PARTIAL
    assert world.source.counters.holes == 1
    world.publish(AllBlocksCleared(), stored(7, None))
    world.arrive(10)
    assert world.source.state is SourceState.EXACT
    assert world.copies() == world.publisher.truth


def test_a_publisher_that_counts_on_past_our_number_is_still_known_as_another() -> None:
    """Only the batch that we have already tells: the numbers fit."""
    world = make_world(clears=False)
    world.connect()
    publish(world, 1, 2, 3)
    world.arrive(3)
    world.restart()
    publish(world, 11, 12, 13, 14, 15)
    world.connect()
    world.answer(100)
    assert world.source.counters.restarts == 1
    world.settle()
    assert world.copies() == world.publisher.truth


def test_a_live_connection_to_a_dead_publisher_is_found_out() -> None:
    """A network that stalls shows the old publisher's batches while questions go to the new one."""
    world = make_world(clears=False)
    publish(world, 1, 2, 3)
    world.connect()
    publish(world, 4)
    world.restart(notices=False)
    publish(world, 11, 12, 13)
    world.answer(100)
    assert world.source.sequence == 2
    world.arrive(1)
    publish(world, 14)
    world.answer(100)
    assert world.source.live_epoch == 1
    world.settle()
    assert world.copies() == world.publisher.truth


def test_a_snapshot_is_not_continued_over_another_connection() -> None:
    """It has no batch by which the publisher could be known again."""
    world = make_world(clears=False)
    publish(world, 1)
    world.connect()
    world.answer(100)
    assert (kinds(world), world.source.state) == ([(SNAPSHOT, 0)], SourceState.EXACT)
    world.restart()
    world.connect()
    publish(world, 11, lost=True)
    publish(world, 12)
    world.arrive(1)
    world.pass_time(1.1)  # the snapshot question gets lost
    world.answer(100)
    # Batch 1 fits the number after the snapshot's, and is another publisher's: the world checks.
    world.settle()
    assert world.copies() == world.publisher.truth


def message(world: EventWorld, sequence: int, block_hash: int) -> PublishedBatch:
    world.ts += 1.0
    payload = encode_batch(KvEventBatch(world.ts, (stored(block_hash, None),), 0))
    return PublishedBatch("t", sequence, payload)


def test_a_snapshot_is_not_continued_by_another_publishers_replay() -> None:
    """It has the same numbers, and nothing but heartbeats where live batches are held."""
    world = make_world()
    publish(world, 1, 2)
    world.connect()
    world.answer(100)
    number = world.publisher.next_sequence
    publish(world, 3, lost=True)
    world.publish()
    publish(world, 4)
    world.arrive(1)
    world.restart(notices=False)
    while world.publisher.next_sequence < number:
        publish(world, 5)
    publish(world, 6)
    world.publish()
    for _ in range(5):
        world.answer(100)  # checks that exact is the truth
        assert world.source.state is SourceState.PARTIAL
        world.pass_time(1)
    assert (REPLAY, number) in kinds(world)
    world.disconnect()
    world.settle()
    assert world.is_settled()
    assert world.copies() == world.publisher.truth


def test_numbers_that_go_down_on_one_connection_may_be_two_publishers() -> None:
    """As on a socket that both connect to: the old one's last batch comes after the new one's first, and has
    the number that is next."""
    world = make_world(clears=False)
    world.connect()
    publish(world, 1, 2)
    stale = message(world, 1, 99)
    world.arrive(2)
    world.publisher = type(world.publisher)(world)
    world.source.live(world.publisher.publish(stored(11, None)), now_s=world.now_s)
    assert world.source.sequence == 0
    world.publisher.publish(stored(12, None))
    world.source.live(stale, now_s=world.now_s)
    assert world.source.sequence == 0
    world.answer(100)
    world.settle()
    assert world.copies() == world.publisher.truth
    assert not world.facts.holders(99)


def test_what_is_held_back_from_before_such_a_turn_is_dropped() -> None:
    world = make_world(clears=False)
    join(world)
    base = world.source.sequence or 0
    stale = message(world, base + 5, 99)
    world.source.live(stale, now_s=world.now_s)
    assert world.source.num_buffered == 1
    world.source.live(message(world, base + 3, 98), now_s=world.now_s)
    assert world.source.num_buffered == 1
    world.source.live(message(world, 0, 97), now_s=world.now_s)
    assert world.source.num_buffered == 0


def test_a_publisher_without_snapshots_is_replayed_from_the_beginning_after_a_second() -> None:
    world = make_world(snapshots=False, clears=False)
    publish(world, 1, 2)
    world.connect()
    world.pass_time(0.9)
    assert world.source.counters.unsupported_snapshots == 0
    world.pass_time(0.2)
    assert world.source.ask is not None
    assert (world.source.ask.kind, world.source.ask.start) == (AskKind.REPLAY, 0)
    world.answer(100)
    assert world.source.state is SourceState.EXACT
    assert kinds(world) == [(REPLAY, 0), (REPLAY, 1)]


def test_a_snapshot_of_a_publisher_that_does_not_know_all_is_partial() -> None:
    world = make_world()
    world.skip_number()
    world.connect()
    world.answer(100)
    assert world.source.state is SourceState.PARTIAL
    world.publisher.knows_all = True
    world.pass_time(5.1)
    world.answer(100)
    assert world.source.state is SourceState.EXACT


def test_a_full_buffer_is_dropped_and_asked_for_again() -> None:
    world = make_world(options=SourceOptions(buffer_batches=5))
    publish(world, 1)
    world.connect()
    publish(world, *range(10, 20))
    world.arrive(10)
    assert world.source.counters.overflows == 1
    assert world.source.num_buffered <= 5
    world.settle()
    assert world.copies() == world.publisher.truth


def test_a_full_buffer_in_bytes_too() -> None:
    world = make_world(options=SourceOptions(buffer_bytes=300))
    world.connect()
    publish(world, *range(10, 20))
    world.arrive(10)
    assert world.source.counters.overflows > 0
    world.settle()
    assert world.copies() == world.publisher.truth


def test_unanswered_questions_wait_longer_each_time_and_end_in_partial() -> None:
    options = SourceOptions(answer_s=1, snapshot_answer_s=1, backoff_s=1, max_backoff_s=2, retry_s=30)
    world = make_world(snapshots=False, options=options)
    publish(world, 1)
    world.connect()
    publish(world, 2)
    world.arrive(10)
    asked: list[float] = []
    last_id = 0
    for _ in range(300):
        world.pass_time(0.1)
        ask = world.source.ask
        if ask is not None and ask.ask_id != last_id:
            last_id = ask.ask_id
            asked.append(world.now_s)
    waits = [round(b - a) for a, b in pairwise(asked)]
    # The snapshot question first, which is not counted as a failure; then a second for the answer that
    # does not come, and one, two, two more of waiting.
    assert waits[:4] == [1, 2, 3, 3]
    assert world.source.state is SourceState.PARTIAL
    assert world.source.sequence == 2


def test_silence_is_off_and_keeps_the_blocks_until_the_second_limit() -> None:
    world = make_world(clears=False, options=SourceOptions(silence_s=10, drop_after_s=20))
    world.connect()
    publish(world, 1)
    world.arrive(1)
    world.pass_time(10)
    assert world.source.state is SourceState.OFF
    assert world.facts.num_blocks("s") == 1
    publish(world, 2)
    world.arrive(1)
    assert world.source.state is SourceState.EXACT
    world.pass_time(30)
    assert world.facts.num_blocks("s") == 0
    assert kinds(world)[-1][0] is DeliveryKind.CLEARED
    assert world.source.counters.drops == 1


def test_without_a_replay_endpoint_a_broken_connection_is_partial_until_cleared() -> None:
    world = make_world(replay=False)
    world.connect()
    assert world.source.ask is None
    world.publish(AllBlocksCleared(), stored(1, None))
    world.arrive(1)
    assert world.source.state is SourceState.EXACT
    world.disconnect()
    assert world.source.state is SourceState.PARTIAL
    world.connect()
    publish(world, 2)
    world.arrive(1)
    assert world.source.state is SourceState.PARTIAL
    world.publish(AllBlocksCleared(), stored(3, None))
    world.arrive(1)
    assert world.source.state is SourceState.EXACT
    assert world.copies() == world.publisher.truth


def test_what_cannot_be_decoded_is_a_hole_that_a_snapshot_mends() -> None:
    world = make_world()
    sequence = join(world) + 1
    world.publisher.publish(stored(5, None))
    world.source.live(PublishedBatch("t", sequence, b"\xc1"), now_s=world.now_s)
    assert world.source.state is SourceState.PARTIAL
    assert world.source.counters.malformed == 1
    world.settle()
    assert world.copies() == world.publisher.truth


def test_ranks_behind_one_address_are_owners_of_their_own() -> None:
    world = make_world(replay=False)
    world.connect()
    for sequence, rank, events in (
        (0, 0, (AllBlocksCleared(),)),
        (1, 0, (stored(1, None),)),
        (2, 1, (stored(1, None),)),
        (3, 1, (AllBlocksCleared(),)),
    ):
        payload = encode_batch(KvEventBatch(0.5, events, rank))
        world.source.live(PublishedBatch("t", sequence, payload), now_s=world.now_s)
    assert [owner.rank for owner in world.facts.holders(1)] == [0]


def test_with_two_ranks_one_cleared_rank_does_not_make_the_source_whole() -> None:
    world = make_world(replay=False)
    world.connect()

    def live(sequence: int, rank: int, *events: object) -> SourceState:
        payload = msgspec.msgpack.encode([0.5, list(events), rank])
        world.source.live(PublishedBatch("t", sequence, payload), now_s=world.now_s)
        return world.source.state

    live(5, 0, stored(1, None))
    assert live(6, 1, stored(2, None)) is SourceState.PARTIAL
    assert live(7, 0, AllBlocksCleared()) is SourceState.PARTIAL
    assert live(8, 1, AllBlocksCleared()) is SourceState.EXACT


def test_bad_options_are_named() -> None:
    with pytest.raises(InvalidInput, match="answer_s: -1"):
        SourceOptions(answer_s=-1)
    with pytest.raises(InvalidInput, match="max_attempts: 0"):
        SourceOptions(max_attempts=0)
