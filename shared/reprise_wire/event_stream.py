"""A publisher without its sockets: sequence numbers, the replay buffer, and the frames to send."""

from collections import deque
from collections.abc import Iterator

from reprise_core.errors import FailedPrecondition
from reprise_core.kv_events import KvEventBatch
from reprise_wire.event_codec import (
    EventForm,
    ReplayRequest,
    encode_batch,
    pub_frames,
    replay_end_frames,
    replay_reply_frames,
    with_rank,
)


class PublisherClosed(FailedPrecondition, RuntimeError):
    """Something was published after the end; a RuntimeError, as in the reference."""


class EventStream:
    """Numbers batches from 0 and keeps the last `buffer_steps` of them for replay.

    Invariants: sequences in the buffer ascend; the newest `buffer_steps` numbered batches are in it,
    except those that were `skip`ped.
    """

    def __init__(
        self,
        *,
        topic: str,
        rank: int,
        buffer_steps: int,
        form: EventForm = EventForm.MAP,
        next_sequence: int = 0,
    ) -> None:
        self._topic = topic
        self._rank = rank
        self._form = form
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._closed = False
        self.next_sequence = next_sequence

    def publish(self, batch: KvEventBatch) -> list[bytes]:
        """The PUB frames of a batch; a missing rank becomes this publisher's."""
        return self.publish_payload(encode_batch(with_rank(batch, self._rank), form=self._form))

    def publish_payload(self, payload: bytes) -> list[bytes]:
        """The PUB frames of a batch that is encoded already."""
        if self._closed:
            raise PublisherClosed("the event publisher is closed")
        sequence = self.next_sequence
        self.next_sequence += 1
        self._buffer.append((sequence, payload))
        return pub_frames(self._topic, sequence, payload)

    def skip(self) -> int:
        """Use up a number for a batch that was lost, so that subscribers see a gap."""
        sequence = self.next_sequence
        self.next_sequence += 1
        return sequence

    def replay(self, request: ReplayRequest) -> Iterator[list[bytes]]:
        """The messages that answer a request, the end mark last.

        What the buffer no longer holds is left out without a word: the consumer compares the first
        number it gets with the one it asked for.
        """
        for sequence, payload in tuple(self._buffer):
            if sequence >= request.start:
                yield replay_reply_frames(request.identity, self._topic, sequence, payload)
        yield replay_end_frames(request.identity)

    def close(self) -> None:
        self._closed = True
