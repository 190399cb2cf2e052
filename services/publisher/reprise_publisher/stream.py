"""The published stream: numbers, ring and frames, without sockets."""

from collections.abc import Callable, Sequence
from time import time

from reprise_core.errors import DataLoss
from reprise_core.kv_events import AllBlocksCleared, KvEvent, KvEventBatch
from reprise_publisher.metrics import PublisherMetrics
from reprise_publisher.numbering import IntakeNumbering
from reprise_publisher.replay_ring import ReplayRing
from reprise_wire.event_codec import encode_batch, pub_frames
from reprise_wire.event_intake import decode_intake

INTAKE_FRAMES = 2
_BATCH_HEADS = (0x92, 0x93)
"""A batch is a msgpack array of two (no rank) or three."""


class PublishedStream:
    """Every batch gets its number before anything can lose it, and lies in the ring before it is sent.

    A new stream, and a new scheduler epoch, begin with AllBlocksCleared.
    """

    def __init__(
        self,
        *,
        topic: str,
        rank: int,
        ring: ReplayRing,
        publish: Callable[[Sequence[bytes]], None],
        metrics: PublisherMetrics,
    ) -> None:
        self._topic = topic
        self._rank = rank
        self._ring = ring
        self._publish = publish
        self._metrics = metrics
        self._numbering = IntakeNumbering()
        self.next_sequence = 0
        self.num_dropped = 0

    def announce_start(self) -> None:
        self._emit_own("cleared", (AllBlocksCleared(),))

    def heartbeat(self) -> None:
        """An empty batch; whoever missed the one before sees the gap now."""
        self._emit_own("heartbeat", ())

    def take_in(self, frames: Sequence[bytes]) -> None:
        """One intake message. Raises DataLoss, with nothing changed, for one that is malformed: its number
        then shows as a gap before the next batch."""
        if len(frames) != INTAKE_FRAMES:
            raise DataLoss(f"event intake message of {len(frames)} frames, must have {INTAKE_FRAMES}")
        head, payload = frames
        if not payload or payload[0] not in _BATCH_HEADS:
            raise DataLoss("event intake payload is no event batch")
        arrival = self._numbering.arrive(decode_intake(head))
        if arrival.duplicate:
            self._metrics.duplicates.inc()
            return
        if arrival.new_epoch:
            self._metrics.epochs.inc()
            self._emit_own("cleared", (AllBlocksCleared(),))
        self.next_sequence += arrival.gap
        self.num_dropped += arrival.gap
        self._metrics.batches_dropped.labels("upstream").inc(arrival.gap)
        self._emit("events", payload)

    def _emit_own(self, kind: str, events: tuple[KvEvent, ...]) -> None:
        self._emit(kind, encode_batch(KvEventBatch(time(), events, self._rank)))

    def _emit(self, kind: str, payload: bytes) -> None:
        sequence = self.next_sequence
        self.next_sequence += 1
        self._ring.append(sequence, payload)
        self._publish(pub_frames(self._topic, sequence, payload))
        self._metrics.batches.labels(kind).inc()
        self._metrics.published_bytes.inc(len(payload))
