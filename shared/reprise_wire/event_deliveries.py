"""What was delivered of one source: how far, whether it is whole, and what ties it to its publisher."""

from collections.abc import Callable

from reprise_core.errors import DataLoss
from reprise_core.kv_events import AllBlocksCleared, KvEventBatch
from reprise_wire.event_codec import PublishedBatch, decode_batch
from reprise_wire.event_source_values import Delivery, DeliveryKind, SourceCounters
from reprise_wire.event_wholeness import Wholeness

_CLEARED_NAME = AllBlocksCleared.__name__.encode()


class Deliveries:
    """`say` is for notices: kind, text and facts."""

    def __init__(
        self,
        source: str,
        deliver: Callable[[Delivery], None],
        say: Callable[..., None],
        counters: SourceCounters,
    ) -> None:
        self._source = source
        self._deliver = deliver
        self._say = say
        self._counters = counters
        self.next: int | None = None
        """The sequence to apply next; None while nothing is had that could go on."""
        self.anchor: tuple[int, bytes] | None = None
        """Number and payload of the last batch with events, where we have it. A heartbeat proves nothing:
        publishers keep one for many."""
        self.wholeness = Wholeness()
        self.are_any = False
        """Something was delivered, and is not void."""

    def take(self, kind: DeliveryKind, sequence: int, topic: str, payload: bytes) -> bool:
        """The next batch. False when it cannot be read: then what it would have told is missing."""
        self.next = sequence + 1
        try:
            batch = decode_batch(payload, on_unknown=self.unknown_event)
        except DataLoss as error:
            self.anchor = sequence, payload
            self._counters.malformed += 1
            self._say("malformed", str(error), sequence=sequence)
            self.wholeness.lose()
            return False
        if batch.events:
            self.anchor = sequence, payload
        self.give(kind, sequence, topic, batch, len(payload))
        return True

    def give(
        self,
        kind: DeliveryKind,
        sequence: int,
        topic: str,
        batch: KvEventBatch,
        num_bytes: int,
        unresolved: tuple[int, ...] = (),
    ) -> None:
        self.are_any = True
        self.wholeness.see(batch)
        self._deliver(Delivery(self._source, kind, sequence, topic, batch, num_bytes, unresolved))

    def starts_over(self, message: PublishedBatch) -> bool:
        """Whether what came before this batch does not matter for the state after it."""
        if message.sequence == 0:
            return True
        if _CLEARED_NAME not in message.payload:
            return False
        try:
            batch = decode_batch(message.payload, on_unknown=lambda name: None)
        except DataLoss:
            return False
        return self.wholeness.is_made_by(batch)

    def start_over(self) -> None:
        """What comes next replaces what was delivered, and says so itself."""
        self.next, self.anchor = None, None
        self.wholeness.start()

    def void(self) -> None:
        """What was delivered no longer counts."""
        last = self.next - 1 if self.next is not None else 0
        if self.are_any:
            cleared = KvEventBatch(0.0, (AllBlocksCleared(),))
            self._deliver(Delivery(self._source, DeliveryKind.CLEARED, last, "", cleared, 0))
            self.are_any = False
        self.start_over()

    def accept_hole(self, sequence: int) -> None:
        """Goes on with this batch, without those before it."""
        first = self.next if self.next is not None else 0
        self._counters.holes += 1
        self._counters.missing_batches += max(0, sequence - first)
        self.wholeness.lose()
        self._say("gap", f"{sequence - first} batches are missing", first=first, last=sequence - 1)
        self.next = sequence

    def unknown_event(self, name: str) -> None:
        self._counters.unknown_events += 1
        self._say("unknown", f"event type {name!r}")
