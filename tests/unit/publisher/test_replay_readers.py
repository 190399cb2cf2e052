"""Replays at each reader's pace, without sockets."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from reprise_publisher.metrics import PublisherMetrics
from reprise_publisher.replay_readers import BURST_MESSAGES, ReplayReaders, Sent
from reprise_publisher.replay_ring import ReplayRing
from reprise_wire.event_codec import END_SEQ, ReplayRequest


class Line:
    """Readers that take so many messages and no more until told."""

    def __init__(self) -> None:
        self.room: dict[bytes, int] = {}
        self.gone: set[bytes] = set()
        self.got: dict[bytes, list[bytes]] = {}

    def send(self, frames: Sequence[bytes]) -> Sent:
        identity = frames[0]
        if identity in self.gone:
            return Sent.GONE
        if self.room.get(identity, 10**9) == 0:
            return Sent.FULL
        self.room[identity] = self.room.get(identity, 10**9) - 1
        self.got.setdefault(identity, []).append(frames[3])
        return Sent.DONE

    def numbers(self, identity: bytes) -> list[int]:
        """Of a finished answer."""
        *numbers, end = self.got[identity]
        assert end == END_SEQ
        return [int.from_bytes(number, "big") for number in numbers]


def make(num_batches: int, limit: int = 4) -> tuple[ReplayReaders, Line, ReplayRing, CollectorRegistry]:
    ring = ReplayRing(limit_batches=1000, limit_bytes=10**9)
    for sequence in range(num_batches):
        ring.append(sequence, b"p")
    line, registry = Line(), CollectorRegistry()
    readers = ReplayReaders(
        ring,
        topic="t",
        with_topic=True,
        limit=limit,
        stall_s=10.0,
        send=line.send,
        metrics=PublisherMetrics(registry),
    )
    return readers, line, ring, registry


def test_bursts_take_turns() -> None:
    readers, line, _, _ = make(3 * BURST_MESSAGES)
    for identity in (b"a", b"b"):
        assert readers.request(ReplayRequest(identity, 0), now_s=0)
    assert readers.advance(now_s=0)
    assert {identity: len(got) for identity, got in line.got.items()} == {
        b"a": BURST_MESSAGES,
        b"b": BURST_MESSAGES,
    }
    while readers.advance(now_s=0):
        pass
    assert len(readers) == 0
    assert line.numbers(b"a") == line.numbers(b"b") == list(range(3 * BURST_MESSAGES))


def test_an_answer_ends_where_the_ring_ended_at_the_request() -> None:
    readers, line, ring, _ = make(5)
    readers.request(ReplayRequest(b"a", 3), now_s=0)
    ring.append(5, b"later")
    readers.advance(now_s=0)
    assert line.numbers(b"a") == [3, 4]


def test_a_full_reader_waits_then_goes_on_and_in_the_end_is_given_up() -> None:
    readers, line, _, registry = make(20)
    line.room[b"a"] = 5
    readers.request(ReplayRequest(b"a", 0), now_s=0)
    assert not readers.advance(now_s=1)
    assert not readers.advance(now_s=9)
    line.room[b"a"] = 3
    assert not readers.advance(now_s=10)
    assert not readers.advance(now_s=20)
    assert len(readers) == 1
    readers.advance(now_s=20.1)
    assert len(readers) == 0
    assert registry.get_sample_value("reprise_publisher_replays_given_up_total") == 1
    assert [int.from_bytes(number, "big") for number in line.got[b"a"]] == list(range(8))


def test_a_reader_overtaken_by_the_ring_goes_on_with_what_is_kept() -> None:
    ring = ReplayRing(limit_batches=10, limit_bytes=10**9)
    for sequence in range(10):
        ring.append(sequence, b"p")
    line, registry = Line(), CollectorRegistry()
    readers = ReplayReaders(
        ring,
        topic="t",
        with_topic=True,
        limit=1,
        stall_s=10,
        send=line.send,
        metrics=PublisherMetrics(registry),
    )
    line.room[b"a"] = 2
    readers.request(ReplayRequest(b"a", 0), now_s=0)
    readers.advance(now_s=0)
    for sequence in range(10, 15):
        ring.append(sequence, b"p")
    line.room[b"a"] = 100
    readers.advance(now_s=0)
    assert line.numbers(b"a") == [0, 1, 5, 6, 7, 8, 9]
    assert registry.get_sample_value("reprise_publisher_replay_batches_overtaken_total") == 3


def test_readers_that_left_and_readers_too_many() -> None:
    readers, line, _, _ = make(5, limit=2)
    line.room = {b"a": 0, b"b": 0}
    assert readers.request(ReplayRequest(b"a", 0), now_s=0)
    assert readers.request(ReplayRequest(b"b", 0), now_s=0)
    assert not readers.request(ReplayRequest(b"c", 0), now_s=0)
    assert readers.request(ReplayRequest(b"a", 4), now_s=0)
    line.gone.add(b"b")
    readers.advance(now_s=0)
    assert len(readers) == 1
    line.room[b"a"] = 9
    readers.advance(now_s=0)
    assert line.numbers(b"a") == [4]


def test_a_replay_tells_every_heartbeat_from_wherever_it_begins() -> None:
    ring = ReplayRing(limit_batches=10, limit_bytes=10**9)
    ring.append(0, b"p")
    for sequence in range(1, 200):
        ring.append(sequence, b"beat", is_heartbeat=True)
    line, registry = Line(), CollectorRegistry()
    readers = ReplayReaders(
        ring,
        topic="t",
        with_topic=True,
        limit=2,
        stall_s=10,
        send=line.send,
        metrics=PublisherMetrics(registry),
    )
    readers.request(ReplayRequest(b"all", 0), now_s=0)
    readers.request(ReplayRequest(b"some", 150), now_s=0)
    for sequence in range(200, 210):  # the row goes on meanwhile
        ring.append(sequence, b"beat", is_heartbeat=True)
    while readers.advance(now_s=0):
        pass
    assert line.numbers(b"all") == list(range(200))
    assert line.numbers(b"some") == list(range(150, 200))
    assert registry.get_sample_value("reprise_publisher_replay_batches_overtaken_total") == 0
