"""Following a source through losses, restarts and silence: what a subscriber ends up knowing."""

import random
from collections import deque

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from reprise_core.block_record import BlockRecord
from reprise_core.errors import DataLoss
from reprise_core.kv_events import AllBlocksCleared, KvEventBatch
from reprise_publisher.metrics import PublisherMetrics
from reprise_publisher.outgoing import Outgoing, OutgoingOptions
from reprise_publisher.record_keeper import RecordKeeper
from reprise_publisher.replay_ring import ReplayRing
from reprise_publisher.source_follower import MAX_ATTEMPTS, RETRY_S, FollowerLimits, SourceFollower
from reprise_publisher.stream import PublishedStream
from reprise_wire.event_codec import EventForm, decode_batch, encode_event, parse_pub_frames
from reprise_wire.event_intake import RequestKind, StateRequest, batch_frames, parse_request
from support.event_source import EventSource, facts_of, removed, stored

CLEARED = (AllBlocksCleared(),)


class Subscriber:
    """Applies what it sees, and notes the holes."""

    def __init__(self) -> None:
        self.record = BlockRecord(limit_blocks=10_000)
        self.shown: list[tuple[int, KvEventBatch]] = []

    def take(self, frames: list[bytes]) -> None:
        message = parse_pub_frames(frames)
        try:
            batch = decode_batch(message.payload)
        except DataLoss:
            return
        self.shown.append((message.sequence, batch))
        for event in batch.events:
            self.record.apply(event)

    @property
    def numbers(self) -> list[int]:
        return [sequence for sequence, _ in self.shown]

    @property
    def events(self) -> list[tuple[object, ...]]:
        return [batch.events for _, batch in self.shown]


class Publisher:
    """All of it but the sockets."""

    def __init__(self, *, hold_bytes: int = 1_000_000) -> None:
        self.subscriber = Subscriber()
        self.requests: deque[StateRequest] = deque()
        self.now_s = 100.0
        self.registry = CollectorRegistry()
        metrics = PublisherMetrics(self.registry)
        outgoing = Outgoing(OutgoingOptions())
        self.keeper = RecordKeeper(
            BlockRecord(limit_blocks=10_000), outgoing, rank=0, limit_bytes=2000, metrics=metrics
        )
        self.stream = PublishedStream(
            topic="t",
            rank=0,
            ring=ReplayRing(limit_batches=100, limit_bytes=10**6),
            keeper=self.keeper,
            outgoing=outgoing,
            publish=lambda frames: self.subscriber.take(list(frames)),
            metrics=metrics,
        )
        self.follower = SourceFollower(
            self.stream,
            lambda identity, frames: self.requests.append(parse_request(frames)),
            FollowerLimits(state_timeout_s=2.0, hold_bytes=hold_bytes),
            metrics,
        )
        self.follower.start()

    def take(self, *messages: list[bytes]) -> None:
        for frames in messages:
            self.follower.take_in(b"id", frames, now_s=self.now_s)

    @property
    def complete(self) -> bool:
        return self.stream.freeze().complete

    @property
    def facts(self) -> dict[tuple[int | bytes, str | None], tuple[object, ...]]:
        self.keeper.catch_up()
        return facts_of(self.keeper.record)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.follower.advance(now_s=self.now_s)

    def wanted(self) -> int:
        """The id of the state that was asked for last."""
        request = self.requests.pop()
        assert request.kind is RequestKind.WANT_STATE
        self.requests.clear()
        return request.state_id

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"reprise_publisher_{name}", labels) or 0.0


@pytest.fixture
def source() -> EventSource:
    return EventSource(random.Random(1))


def test_batches_of_a_new_source_pass_as_they_come(source: EventSource) -> None:
    publisher = Publisher()
    publisher.take(source.hello(), source.batch(stored(1)), source.batch(removed(1)))
    assert publisher.subscriber.events == [CLEARED, (stored(1),), (removed(1),)]
    assert publisher.subscriber.numbers == [0, 1, 2]
    assert not publisher.requests
    assert publisher.complete


def test_a_publisher_that_comes_later_tells_the_state_then_what_it_does_not_contain(
    source: EventSource,
) -> None:
    publisher = Publisher()
    source.batch(stored(1, 2))
    publisher.take(source.batch(stored(3, parent=1)))
    assert not publisher.complete
    state = source.state(publisher.wanted(), events_per_chunk=1)
    publisher.take(source.batch(removed(2)), *state, source.batch(stored(5, parent=2)))
    assert publisher.subscriber.events[:2] == [CLEARED, CLEARED]
    assert publisher.subscriber.events[-2:] == [(removed(2),), (stored(5, parent=2),)]
    assert facts_of(publisher.subscriber.record) == facts_of(source.record)
    assert publisher.subscriber.numbers == list(range(len(publisher.subscriber.shown)))
    assert [(r.kind, r.index) for r in publisher.requests] == [
        (RequestKind.STATE_ACK, i) for i in range(len(state))
    ]
    assert publisher.complete
    assert publisher.facts == facts_of(source.record)


def test_a_hello_is_enough_to_find_an_idle_source(source: EventSource) -> None:
    publisher = Publisher()
    source.batch(stored(1))
    publisher.take(source.hello())
    publisher.take(*source.state(publisher.wanted()))
    assert publisher.subscriber.events[:2] == [CLEARED, CLEARED]
    assert facts_of(publisher.subscriber.record) == facts_of(source.record) != {}


def test_a_hole_stays_in_the_numbers_and_the_state_makes_up_for_it(source: EventSource) -> None:
    publisher = Publisher()
    publisher.take(source.batch(stored(1)))
    source.batch(removed(1))
    source.batch(stored(2))
    publisher.take(source.batch(stored(3)))
    publisher.take(*source.state(publisher.wanted()))
    # 2 and 3 were lost.
    assert publisher.subscriber.numbers[:3] == [0, 1, 4]
    assert publisher.metric("batches_dropped_total", cause="upstream") == 2
    assert facts_of(publisher.subscriber.record) == facts_of(source.record)


def test_a_lost_tail_shows_at_the_next_hello(source: EventSource) -> None:
    publisher = Publisher()
    publisher.take(source.batch(stored(1)))
    source.batch(AllBlocksCleared())
    publisher.take(source.hello())
    publisher.take(*source.state(publisher.wanted()))
    assert publisher.subscriber.numbers == [0, 1, 3, 4]
    assert publisher.subscriber.record.num_blocks == 0
    assert publisher.complete


def test_a_new_source_with_empty_caches_is_cleared_only(source: EventSource) -> None:
    publisher = Publisher()
    publisher.take(source.batch(stored(1)))
    other = EventSource(random.Random(2))
    publisher.take(other.hello(), source.batch(stored(9)))
    assert publisher.subscriber.events == [CLEARED, (stored(1),), CLEARED]
    assert not publisher.requests
    assert publisher.metric("epochs_total") == 1
    assert publisher.metric("replaced_total") == 1


def test_a_new_source_that_was_not_seen_from_its_start_is_cleared_at_once_and_asked(
    source: EventSource,
) -> None:
    publisher = Publisher()
    publisher.take(source.batch(stored(1)))
    other = EventSource(random.Random(2))
    other.batch(stored(2))
    publisher.take(other.batch(stored(3)))
    assert publisher.subscriber.events[-1] == CLEARED
    publisher.take(*other.state(publisher.wanted()))
    assert facts_of(publisher.subscriber.record) == facts_of(other.record)


def test_a_source_that_never_answers_is_followed_and_the_stream_says_that_it_lacks(
    source: EventSource,
) -> None:
    publisher = Publisher()
    source.batch(stored(1))
    source.batch(stored(2))
    publisher.take(source.batch(stored(3)))
    publisher.pass_time(1.9)
    assert publisher.subscriber.events == [CLEARED]
    publisher.pass_time(0.2)
    # The two that were not seen are a hole.
    assert publisher.subscriber.numbers == [0, 3, 4]
    assert publisher.subscriber.events == [CLEARED, CLEARED, (stored(3),)]
    assert not publisher.complete
    # It is not asked again, and nothing waits, though more is lost.
    publisher.requests.clear()
    source.batch(stored(4))
    publisher.take(source.batch(stored(5)))
    assert publisher.subscriber.events[3:] == [CLEARED, (stored(5),)]
    assert not publisher.requests
    publisher.take(source.batch(AllBlocksCleared()))
    assert publisher.complete


def test_a_source_that_says_hello_is_asked_again(source: EventSource) -> None:
    publisher = Publisher()
    source.batch(stored(1))
    publisher.take(source.hello())
    publisher.pass_time(2.1)
    publisher.requests.clear()
    publisher.take(source.hello(), source.batch(stored(2)))
    assert not publisher.requests
    publisher.pass_time(RETRY_S)
    publisher.take(source.hello())
    publisher.take(*source.state(publisher.wanted()))
    assert publisher.complete
    assert facts_of(publisher.subscriber.record) == facts_of(source.record)


def test_a_loss_during_the_state_asks_for_another(source: EventSource) -> None:
    publisher = Publisher()
    source.batch(stored(1, 2, 4, 8))
    publisher.take(source.hello())
    first, *rest = source.state(publisher.wanted(), events_per_chunk=1)
    assert rest
    publisher.take(first)
    source.batch(removed(8))
    publisher.take(source.batch(stored(9, parent=4)))
    state_id = publisher.wanted()
    publisher.take(*rest)
    assert publisher.metric("states_total", outcome="stray_chunk") == len(rest)
    publisher.take(*source.state(state_id))
    assert facts_of(publisher.subscriber.record) == facts_of(source.record)
    assert publisher.complete


def test_a_state_older_than_the_loss_is_not_taken(source: EventSource) -> None:
    publisher = Publisher()
    source.batch(stored(1))
    publisher.take(source.hello())
    old = source.state(publisher.wanted())
    source.batch(removed(1))
    publisher.take(source.batch(stored(2)), *old)
    publisher.take(*source.state(publisher.wanted()))
    assert facts_of(publisher.subscriber.record) == facts_of(source.record)


def test_more_live_batches_than_may_be_held_start_over_and_in_the_end_go_out() -> None:
    publisher = Publisher(hold_bytes=400)
    source = EventSource(random.Random(1))
    source.batch(stored(1))
    publisher.take(source.hello())
    asked = 1
    while publisher.follower.deadline_s is not None:
        publisher.take(source.batch(stored(2)))
        asked = max(asked, publisher.requests[-1].state_id if publisher.requests else 0)
    assert asked == MAX_ATTEMPTS
    assert publisher.metric("held_dropped_total") > 0
    assert publisher.metric("states_total", outcome="given_up") == 1
    assert not publisher.complete
    assert publisher.subscriber.events[-1] == (stored(2),)


def test_a_source_that_knows_it_lacks_blocks_is_not_asked_for_ever(source: EventSource) -> None:
    publisher = Publisher()
    source.batch(stored(1))
    publisher.take(source.hello())
    publisher.take(*source.state(publisher.wanted(), complete=False))
    assert not publisher.complete
    publisher.requests.clear()
    publisher.pass_time(100)
    publisher.take(source.hello())
    assert not publisher.requests


def test_a_malformed_message_changes_nothing_and_leaves_a_hole(source: EventSource) -> None:
    publisher = Publisher()
    _, content = source.batch(stored(1))
    with pytest.raises(DataLoss):
        publisher.take([b"\xc1", content])
    assert publisher.subscriber.events == [CLEARED]
    publisher.take(source.batch(stored(2)))
    publisher.take(*source.state(publisher.wanted()))
    assert facts_of(publisher.subscriber.record) == facts_of(source.record)


def test_events_that_cannot_be_read_are_made_up_for(source: EventSource) -> None:
    publisher = Publisher()
    publisher.take(source.batch(stored(1)))
    head, _ = source.batch(removed(1), stored(2))
    publisher.take([head, msgspec.msgpack.encode([1.0, 5, 0])])
    publisher.keeper.catch_up()
    assert not publisher.complete
    publisher.pass_time(0)
    publisher.take(*source.state(publisher.wanted()))
    assert publisher.metric("malformed_total", socket="intake") == 1
    assert publisher.complete
    assert publisher.facts == facts_of(source.record)


def test_arrays_maps_and_both_in_one_batch_are_recorded_alike() -> None:
    """kthena#1535: a decoder that knew arrays only left its index empty."""
    events = (stored(1, 2), stored(3, parent=1), removed(2))
    forms = [
        [msgspec.Raw(encode_event(event, form=form)) for event in events]
        for form in (EventForm.MAP, EventForm.ARRAY)
    ]
    mixed = [forms[0][0], forms[1][1], forms[0][2]]
    all_facts = []
    for raw in (*forms, mixed):
        publisher = Publisher()
        publisher.take(batch_frames(b"e", 0, msgspec.msgpack.encode([1.0, raw, 0])))
        all_facts.append(publisher.facts)
    assert set(all_facts[0]) == {(1, "GPU"), (3, "GPU")}
    assert all_facts[0] == all_facts[1] == all_facts[2]


@pytest.mark.parametrize("seed", [random.randrange(2**32) for _ in range(8)])
def test_whatever_is_lost_the_subscriber_ends_up_with_what_the_source_has(seed: int) -> None:
    """Losses of batches, hellos and chunks, restarts of either side, answers that come late."""
    rng = random.Random(seed)
    publisher, source = Publisher(hold_bytes=3000), EventSource(rng)
    pipe: deque[list[bytes]] = deque()
    for _ in range(3000):
        chance = rng.random()
        if chance < 0.004:
            source = EventSource(rng)
            pipe.clear()
        elif chance < 0.008:
            publisher = Publisher(hold_bytes=3000)
        elif chance < 0.3:
            pipe.append(source.hello() if rng.random() < 0.1 else source.random_batch())
            if rng.random() < 0.03:
                pipe.pop()
        elif chance < 0.4 and publisher.requests:
            request = publisher.requests.popleft()
            if request.kind is RequestKind.WANT_STATE and request.epoch == source.epoch:
                pipe.extend(source.state(request.state_id))
        elif chance < 0.95:
            for _ in range(min(len(pipe), rng.randrange(4))):
                publisher.take(pipe.popleft())
        else:
            publisher.pass_time(rng.random())
    for _ in range(200):
        pipe.append(source.hello())
        while pipe:
            publisher.take(pipe.popleft())
        while publisher.requests:
            request = publisher.requests.popleft()
            if request.kind is RequestKind.WANT_STATE and request.epoch == source.epoch:
                pipe.extend(source.state(request.state_id))
        publisher.pass_time(1.0)
    assert publisher.complete, f"seed {seed}"
    assert facts_of(publisher.subscriber.record) == facts_of(source.record), f"seed {seed}"
    assert publisher.facts == facts_of(source.record), f"seed {seed}"
    numbers = publisher.subscriber.numbers
    assert numbers == sorted(set(numbers))
