"""The published stream: numbers, ring, record and frames, without sockets."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import time

from reprise_core.block_record import FrozenRecord, StateEvent
from reprise_core.errors import DataLoss, FailedPrecondition
from reprise_core.kv_events import AllBlocksCleared, BlockStored, KvEvent, KvEventBatch
from reprise_publisher.metrics import PublisherMetrics
from reprise_publisher.outgoing import Outgoing
from reprise_publisher.record_keeper import RecordKeeper
from reprise_publisher.replay_ring import ReplayRing
from reprise_wire.event_codec import decode_batch, pub_frames, with_rank

HEARTBEAT = "heartbeat"


@dataclass(frozen=True, slots=True)
class FrozenStream:
    """The state of the published stream after `sequence`. Belongs to whoever has it."""

    sequence: int
    complete: bool
    """The record has all that the source has, as far as is known here."""
    record: FrozenRecord
    outgoing: Outgoing

    @property
    def num_copies(self) -> int:
        return self.record.num_copies

    def stores(self, blocks_per_event: int) -> Iterator[StateEvent]:
        """As they may leave; see FrozenRecord."""
        for state in self.record.stores(blocks_per_event):
            (event,) = self.outgoing.batch(KvEventBatch(0.0, (state.event,))).events
            assert isinstance(event, BlockStored)
            yield StateEvent(event, state.resolved)


class PublisherClosed(FailedPrecondition, RuntimeError):
    """Something was published after the end; a RuntimeError, as in the reference."""


_ARRAY_OF_3, _NIL = 0x93, 0xC0


class PublishedStream:
    """Every batch gets its number before anything can lose it, lies in the ring before it is sent, and is
    recorded after that, when there is time. Not thread-safe."""

    def __init__(
        self,
        *,
        topic: str,
        rank: int,
        ring: ReplayRing,
        keeper: RecordKeeper,
        outgoing: Outgoing,
        publish: Callable[[Sequence[bytes]], None],
        metrics: PublisherMetrics,
    ) -> None:
        self._topic = topic
        self._rank = rank
        self._ring = ring
        self._outgoing = outgoing
        self._publish = publish
        self._metrics = metrics
        self._keeper = keeper
        self.next_sequence = 0
        self.num_dropped = 0
        self._num_batches: Counter[str] = Counter()
        self._num_bytes = 0
        self._closed = False

    def close(self) -> None:
        """Nothing can be published after this."""
        self._closed = True

    @property
    def knows_all(self) -> bool:
        """Nothing is known to be missing of what the source has. The source's own cleared makes it so."""
        return self._keeper.knows_all

    @knows_all.setter
    def knows_all(self, knows_all: bool) -> None:
        self._keeper.set_knows_all(knows_all, since=self.next_sequence)

    @property
    def complete(self) -> bool:
        return self.knows_all and not self._keeper.record.overflowed

    @property
    def damaged(self) -> bool:
        """A batch of the source could not be read, and nothing has made up for it."""
        return self._keeper.damaged

    def freeze(self) -> FrozenStream:
        self._keeper.catch_up()
        record = self._keeper.record.freeze()
        return FrozenStream(self.next_sequence - 1, self.complete, record, self._outgoing)

    def cleared(self) -> None:
        """Tells that nothing of what was published before holds."""
        self._keeper.forget_waiting()
        self._emit_own("cleared", (AllBlocksCleared(),))

    def heartbeat(self) -> None:
        """An empty batch; whoever missed the one before sees the gap now."""
        self._emit_own(HEARTBEAT, ())

    def skip(self, num_batches: int) -> None:
        """Leaves out the numbers of batches that were lost, so that subscribers see a gap."""
        self.next_sequence += num_batches
        self.num_dropped += num_batches
        self._metrics.batches_dropped.labels("upstream").inc(num_batches)

    def publish(self, kind: str, payload: bytes) -> None:
        """A batch of the source. Its bytes are looked at only where something is missing in them or must not
        leave; else what is no batch is found out when it is recorded."""
        published = payload
        if not self._outgoing.passes_through or not _names_rank(payload):
            try:
                batch = decode_batch(payload, on_unknown=lambda name: None)
            except DataLoss:
                self._metrics.malformed.labels("intake").inc()
                self.skip(1)
                self.knows_all = False
                self._keeper.damaged = True
                return
            published = self._outgoing.encode(self._outgoing.batch(with_rank(batch, self._rank)))
        self._emit(kind, published, payload)

    def _emit_own(self, kind: str, events: tuple[KvEvent, ...]) -> None:
        payload = self._outgoing.encode(KvEventBatch(time(), events, self._rank))
        self._emit(kind, payload, payload)

    def _emit(self, kind: str, payload: bytes, source: bytes) -> None:
        if self._closed:
            raise PublisherClosed("the event publisher is closed")
        sequence = self.next_sequence
        self.next_sequence += 1
        self._ring.append(sequence, payload, is_heartbeat=kind == HEARTBEAT)
        self._publish(pub_frames(self._topic, sequence, payload))
        self._num_batches[kind] += 1
        self._num_bytes += len(payload)
        self._keeper.add(sequence, payload, source)

    def show(self) -> None:
        """Counts go to the metrics once a turn: counters cost as much as publishing."""
        for kind, count in self._num_batches.items():
            self._metrics.batches.labels(kind).inc(count)
        self._metrics.published_bytes.inc(self._num_bytes)
        self._num_batches.clear()
        self._num_bytes = 0


def _names_rank(payload: bytes) -> bool:
    """An array of three whose last is not nil. A rank whose last byte looks like nil is taken for none, and
    the batch is then written again as it was."""
    return payload[0] == _ARRAY_OF_3 and payload[-1] != _NIL
