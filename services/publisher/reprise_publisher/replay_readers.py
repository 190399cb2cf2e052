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


@dataclass
class _Reader:
    position: int
    end: int
    """The position after the last batch that was there when the request came."""
    progress_s: float
    """When it last took a message."""


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
        limit: int,
        stall_s: float,
        send: Callable[[Sequence[bytes]], Sent],
        metrics: PublisherMetrics,
    ) -> None:
        self._ring = ring
        self._topic = topic
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
        end = self._ring.position_of(2**64)
        self._readers[request.identity] = _Reader(start, end, now_s)
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
            elif outcome is Sent.DONE and reader.position > reader.end:
                del self._readers[identity]
            else:
                more = more or outcome is Sent.DONE
        return more

    def _burst(self, identity: bytes, reader: _Reader, now_s: float) -> Sent:
        """DONE after a whole burst, or with `position` past `end` when the end mark is out."""
        for _ in range(BURST_MESSAGES):
            frames, next_position, num_missed = self._next_message(identity, reader)
            outcome = self._send(frames)
            if outcome is not Sent.DONE:
                return outcome
            reader.position = next_position
            reader.progress_s = now_s
            self._metrics.replay_batches_overtaken.inc(num_missed)
            if reader.position > reader.end:
                break
        return Sent.DONE

    def _next_message(self, identity: bytes, reader: _Reader) -> tuple[list[bytes], int, int]:
        """The frames, the position after them, and how many batches were overtaken."""
        found = self._ring.at(reader.position) if reader.position < reader.end else None
        if found is None or found[0] >= reader.end:
            return replay_end_frames(identity), reader.end + 1, max(0, reader.end - reader.position)
        position, batch = found
        frames = replay_reply_frames(identity, self._topic, batch.sequence, batch.payload)
        return frames, position + 1, position - reader.position
