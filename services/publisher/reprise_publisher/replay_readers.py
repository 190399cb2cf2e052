"""Replays in progress: every reader gets all it asked for, at its own pace, and holds up nobody."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from reprise_publisher.metrics import PublisherMetrics
from reprise_publisher.replay_ring import ReplayRing
from reprise_wire.event_codec import ReplayRequest, replay_end_frames, replay_reply_frames

BURST_MESSAGES = 64
"""Messages to one reader before the next reader and the live stream get their turn."""


class Sent(Enum):
    DONE = "done"
    FULL = "full"
    """The reader does not take more now."""
    GONE = "gone"


Send = Callable[[Sequence[bytes]], Sent]


@dataclass
class _Reader:
    position: int
    sequence: int
    """The next number it wants."""
    end: int
    """The number after the last batch that was there when the request came."""
    progress_s: float
    """When it last took a message."""
    ended: bool = False


class ReplayReaders:
    """One answer at a time per reader (a new request replaces the old one); at most `limit` readers.

    A reader so slow that the ring overtakes it goes on with the oldest batch kept, and sees that from
    the sequence. One that takes nothing for `stall_s` is given up.
    """

    def __init__(
        self,
        ring: ReplayRing,
        *,
        topic: str,
        with_topic: bool,
        limit: int,
        stall_s: float,
        send: Send,
        metrics: PublisherMetrics,
    ) -> None:
        self._ring = ring
        self._topic = topic if with_topic else None
        self._limit = limit
        self._stall_s = stall_s
        self._send = send
        self._readers: OrderedDict[bytes, _Reader] = OrderedDict()
        self._metrics = metrics

    def __len__(self) -> int:
        return len(self._readers)

    def request(self, request: ReplayRequest, *, now_s: float) -> bool:
        """False when there are too many readers: the request is dropped."""
        if request.identity not in self._readers and len(self._readers) >= self._limit:
            return False
        start = self._ring.position_of(request.start)
        self._readers[request.identity] = _Reader(start, request.start, self._ring.end_sequence, now_s)
        return True

    def advance(self, *, now_s: float) -> bool:
        """One burst for each reader. True when some reader could take more at once."""
        more = False
        for identity, reader in list(self._readers.items()):
            outcome = self._burst(identity, reader, now_s)
            if outcome is Sent.FULL and now_s - reader.progress_s > self._stall_s:
                outcome = Sent.GONE
            if outcome is Sent.GONE:
                self._metrics.replays_given_up.inc()
                del self._readers[identity]
            elif reader.ended:
                del self._readers[identity]
            else:
                more = more or outcome is Sent.DONE
        return more

    def _burst(self, identity: bytes, reader: _Reader, now_s: float) -> Sent:
        """DONE after a whole burst, or when the end mark is out."""
        for _ in range(BURST_MESSAGES):
            outcome = self._send_next(identity, reader)
            if outcome is not Sent.DONE:
                return outcome
            reader.progress_s = now_s
            if reader.ended:
                break
        return Sent.DONE

    def _send_next(self, identity: bytes, reader: _Reader) -> Sent:
        found = self._ring.at(reader.position) if reader.sequence < reader.end else None
        position, batch = found if found is not None else (reader.position, None)
        if batch is None or batch.sequence >= reader.end:
            outcome = self._send(replay_end_frames(identity, with_topic=self._topic is not None))
            reader.ended = outcome is Sent.DONE
            return outcome
        sequence = max(batch.sequence, reader.sequence)
        outcome = self._send(replay_reply_frames(identity, self._topic, sequence, batch.payload))
        if outcome is Sent.DONE:
            self._metrics.replay_batches_overtaken.inc(position - reader.position)
            reader.sequence = sequence + 1
            reader.position = position + (reader.sequence >= batch.end)
        return outcome
