"""The following of one event source: gaps, replays, snapshots and restarts, without sockets or clock.

The rules, and why they keep `exact` true:

- A live batch is applied only when it is the next one and the live connection is *proven*: one of its
  batches was found equal in an answer of the publisher that our state comes from. Sequence numbers
  alone prove nothing, because every publisher counts from 0.
- A replay that goes on from our state begins early, with the *anchor*, the last batch with events that we
  have. Another anchor, or none, means another publisher: what was delivered is void.
- A lost connection, a snapshot and a number lower than the last live one end the proof.
- What no replay has is asked for as a snapshot; where there is none, the hole is accepted, and the source
  is partial until the publisher says AllBlocksCleared or gives a snapshot.
"""

from collections.abc import Callable

from reprise_core.errors import DataLoss
from reprise_core.kv_events import AllBlocksCleared, KvEventBatch
from reprise_wire.event_asks import Asks
from reprise_wire.event_codec import PublishedBatch, decode_batch
from reprise_wire.event_snapshot import SnapshotChunk, SnapshotMeta
from reprise_wire.event_source_values import (
    Ask,
    AskKind,
    Delivery,
    DeliveryKind,
    LiveBuffer,
    Notice,
    SourceCounters,
    SourceOptions,
    SourceState,
)
from reprise_wire.event_wholeness import Wholeness

_CLEARED_NAME = AllBlocksCleared.__name__.encode()


class EventSource:
    """Takes what comes (`connected`, `live`, `replayed`, ..., `tick`), delivers batches in order.

    The owner sends `ask` whenever it is a new one, on a connection made for it, and makes the live
    connection anew when `live_epoch` grows. Times are monotonic seconds. `can_ask`: there is a replay
    endpoint. Without one nothing proves a connection and nothing fills a gap: a source is exact while
    one connection shows every number from 0 or from AllBlocksCleared on.
    """

    def __init__(
        self,
        name: str,
        *,
        can_ask: bool,
        deliver: Callable[[Delivery], None],
        notify: Callable[[Notice], None] = lambda notice: None,
        options: SourceOptions = SourceOptions(),  # noqa: B008 (frozen)
    ) -> None:
        self.name = name
        self.options = options
        self.counters = SourceCounters()
        self.is_connected = False
        self.live_epoch = 0
        self._deliver = deliver
        self._notify = notify
        self._can_ask = can_ask
        self._next: int | None = None
        """The sequence to apply next; None while nothing is had that could go on."""
        self._anchor: tuple[int, bytes] | None = None
        """Number and payload of the last batch with events, where we have it. A heartbeat proves nothing:
        publishers keep one for many."""
        self._wholeness = Wholeness()
        self._asks = Asks(options, self.counters)
        self._proven = False
        self._behind = False
        """Live batches have shown that others are missing, or the connection was lost."""
        self._delivered = False
        self._last_live: int | None = None
        self._buffer = LiveBuffer(options.buffer_batches, options.buffer_bytes)
        self._tied = False
        """The answer that comes in continues our state."""
        self._hole_at: int | None = None
        """Where the last replay had a hole: two of them at one place make it a lasting one."""
        self._refresh_at_s: float | None = None
        """When a partial source asks for a snapshot again."""
        self._heard_s: float | None = None
        self._is_silent = False

    # --- what there is to see ------------------------------------------------------------------

    @property
    def ask(self) -> Ask | None:
        return self._asks.current

    @property
    def state(self) -> SourceState:
        if self._is_silent or self._heard_s is None:
            return SourceState.OFF
        return SourceState.EXACT if self.is_complete and not self._behind else SourceState.PARTIAL

    @property
    def sequence(self) -> int | None:
        """The last batch that was applied, or the sequence of the snapshot."""
        return None if self._next is None else self._next - 1

    @property
    def is_complete(self) -> bool:
        """What was delivered so far has no hole, whatever is missing after it."""
        return self._wholeness.is_whole and self._next is not None

    @property
    def is_following(self) -> bool:
        """Nothing is being asked for and nothing waits: batches are applied as they come."""
        return self.is_connected and not self._asks.is_busy and self._next is not None

    @property
    def num_buffered(self) -> int:
        return len(self._buffer.batches)

    @property
    def wake_s(self) -> float | None:
        """When `tick` has something to do at the latest; None = not before something comes."""
        asks = self._asks
        times = [asks.retry_at_s, self._refresh_at_s, asks.deadline_s if asks.current else None]
        if self.options.silence_s and self._heard_s is not None:
            if not self._is_silent:
                times.append(self._heard_s + self.options.silence_s)
            elif self._delivered:
                times.append(self._heard_s + self.options.silence_s + self.options.drop_after_s)
        return min((at_s for at_s in times if at_s is not None), default=None)

    # --- what comes ----------------------------------------------------------------------------

    def connected(self, *, now_s: float) -> None:
        """The live connection stands and its subscription is on the way."""
        self.is_connected = True
        if self._asks.retry_at_s is None:
            self._resync(now_s)

    def disconnected(self, *, now_s: float) -> None:
        """The live connection is gone; nothing that it brought may be passed on any more."""
        if self.is_connected:
            self.counters.connections_lost += 1
            self._say("connection", "lost")
        self.is_connected = False
        self._proven = False
        self._last_live = None
        self._buffer.clear()
        self._asks.connection_lost()
        self._behind = self._next is not None
        if self._anchor is None:
            # Nothing could tell whether another connection goes on from here.
            self._next = None
            self._wholeness.lose()
        if not self._can_ask:
            self._wholeness.lose()

    def live(self, message: PublishedBatch, *, now_s: float) -> None:
        self._hear(now_s)
        self.counters.live_batches += 1
        sequence, former = message.sequence, self._last_live
        self._last_live = sequence
        descends = former is not None and sequence <= former
        if sequence == self._next and self._proven and not self._asks.is_busy:
            self._apply(DeliveryKind.LIVE, sequence, message.topic, message.payload, now_s)
        elif (descends or self._next is None or sequence > self._next) and self._starts_over(message):
            self._begin(message, descends, now_s)
        elif not self._can_ask:
            self._go_on_without_asking(message, descends, now_s)
        elif self._next is None and self._begins_anywhere:
            self._begin(message, False, now_s)
        else:
            self._hold(message, descends, now_s)

    def malformed(self, problem: str, *, now_s: float) -> None:
        """A live message that is none; if it was a batch, the next one shows a gap."""
        self._hear(now_s)
        self.counters.malformed += 1
        self._say("malformed", problem)

    def replayed(self, ask_id: int, message: PublishedBatch | None, *, now_s: float) -> None:
        """One batch of the answer to a replay; None is its end."""
        if not self._asks.is_current(ask_id):
            return
        self._hear(now_s)
        self._asks.answered(now_s=now_s)
        if message is None:
            self._replay_ended(now_s)
        elif self._tied or self._tie(message, now_s):
            self._take_replayed(message, now_s)

    def snapshot_part(self, ask_id: int, part: SnapshotChunk, *, now_s: float) -> None:
        if not self._asks.is_current(ask_id):
            return
        self._hear(now_s)
        self._asks.answered(now_s=now_s)
        meta = part.meta
        if not self._asks.is_next_part(meta):
            self._fail(f"snapshot part {meta.index} is not the next one", now_s)
            return
        try:
            batch = decode_batch(part.payload, on_unknown=self._unknown)
        except DataLoss as error:
            self.counters.malformed += 1
            self._fail(str(error), now_s)
            return
        if meta.index == 0:
            self._next, self._anchor = None, None
            self._wholeness.start()
        self.counters.snapshot_parts += 1
        self._give(
            DeliveryKind.SNAPSHOT, meta.sequence, meta.topic, batch, len(part.payload), meta.unresolved
        )
        # The cleared event of its first part makes nothing whole before the last one is there.
        self._wholeness.lose()
        if meta.last:
            self._snapshot_ended(meta, now_s)

    def ask_refused(self, ask_id: int, problem: str, *, now_s: float) -> None:
        """The publisher says that it cannot answer, or its answer cannot be read."""
        if self._asks.is_current(ask_id):
            self._fail(problem, now_s)

    def tick(self, *, now_s: float) -> None:
        """To be called at `wake_s`, after everything that has come was passed on."""
        if self._asks.is_overdue(now_s=now_s):
            if self._asks.awaits_snapshot:
                self._snapshot_unsupported(now_s)
            else:
                self._fail("no answer", now_s)
        if self._asks.take_retry(now_s=now_s):
            self._resync(now_s)
        if self._refresh_at_s is not None and now_s >= self._refresh_at_s:
            self._refresh(now_s)
        self._watch_silence(now_s)

    # --- live batches --------------------------------------------------------------------------

    @property
    def _begins_anywhere(self) -> bool:
        """With nothing to go on from, the next live batch is as good as any."""
        gave_up = self._refresh_at_s is not None
        nothing_to_ask = self.options.start is None and self._asks.has_snapshots is False
        return (gave_up or nothing_to_ask) and not self._asks.is_busy

    def _starts_over(self, message: PublishedBatch) -> bool:
        """Whether what came before this batch does not matter for the state after it."""
        if message.sequence == 0:
            return True
        if _CLEARED_NAME not in message.payload:
            return False
        try:
            batch = decode_batch(message.payload, on_unknown=lambda name: None)
        except DataLoss:
            return False
        return self._wholeness.is_made_by(batch)

    def _begin(self, message: PublishedBatch, descends: bool, now_s: float) -> None:
        """With this live batch, whatever was before. A number that went down on one connection leaves
        open whose the next one is."""
        if descends or (self._next is not None and message.sequence < self._next):
            self.counters.restarts += 1
            was = -1 if self._next is None else self._next - 1
            self._say("restart", "the publisher began anew", was=was, now=message.sequence)
        self._void()
        self._asks.drop()
        if descends:
            self._buffer.clear()
        self._buffer.drop_before(message.sequence + 1)
        self._proven = not (descends and self._can_ask)
        if self._starts_over(message):
            self._wholeness.is_whole = True
            self._refresh_at_s = None
        self._apply(DeliveryKind.LIVE, message.sequence, message.topic, message.payload, now_s)
        self._drain(now_s)

    def _go_on_without_asking(self, message: PublishedBatch, descends: bool, now_s: float) -> None:
        if descends:
            self.counters.restarts += 1
            was = -1 if self._next is None else self._next - 1
            self._say("restart", "the publisher began anew", was=was, now=message.sequence)
            self._void()
            self._next = 0
        if self._next is not None and message.sequence > self._next:
            self.counters.gaps += 1
            self._accept_hole(message.sequence)
        self._proven = True
        self._behind = False
        self._apply(DeliveryKind.LIVE, message.sequence, message.topic, message.payload, now_s)

    def _hold(self, message: PublishedBatch, descends: bool, now_s: float) -> None:
        """Keep a live batch until what comes before it, or its proof, is there."""
        sequence = message.sequence
        if self._next is not None and sequence < self._next and not descends and not self._asks.is_busy:
            self.counters.duplicates += 1
            return
        if descends:
            # What came before it on this connection is another publisher's, or a repeat.
            self._proven = False
            self._buffer.clear()
        self._see_gap(sequence)
        if self._asks.awaits_snapshot and self._proven and sequence == self._next:
            # It is applied now, and again should the snapshot turn out to be older.
            self._apply(DeliveryKind.LIVE, sequence, message.topic, message.payload, now_s)
        if not self._buffer.add(sequence, message.topic, message.payload):
            self.counters.overflows += 1
            self._behind = self._next is None or self._next <= sequence
            self._say("overflow", "the buffer of live batches was full and is dropped", last=sequence)
        if not self._asks.is_busy:
            self._resync(now_s)

    def _see_gap(self, sequence: int) -> None:
        if self._next is None or sequence <= self._next or sequence - 1 in self._buffer.batches:
            return
        if not self._behind:
            self.counters.gaps += 1
            self._say("behind", "batches are missing, asking for them", first=self._next, last=sequence - 1)
        self._behind = True

    def _drain(self, now_s: float) -> None:
        """Apply what was held back and is next now; ask again for what is still missing."""
        if self._next is None:
            return
        if not self._wholeness.is_whole and self._refresh_at_s is None:
            self._refresh_at_s = now_s + self.options.retry_s
        self.counters.duplicates += self._buffer.drop_before(self._next)
        if self._proven:
            while (held := self._buffer.take(self._next)) is not None:
                self._apply(DeliveryKind.LIVE, self._next, *held, now_s)
        if not self._buffer.batches:
            self._behind = False
            if self._proven:
                self._asks.num_failed = 0
            return
        self._behind = self._buffer.first != self._next
        self._resync(now_s)

    # --- asking --------------------------------------------------------------------------------

    def _resync(self, now_s: float) -> None:
        """Ask for what leads from what we have to what is live."""
        if not self._can_ask or not self.is_connected:
            return
        if self._next is not None and (self._anchor is not None or self._buffer.batches):
            self._send(AskKind.REPLAY, self._next if self._anchor is None else self._anchor[0], now_s)
        elif self._asks.has_snapshots is not False:
            self._send(AskKind.SNAPSHOT, 0, now_s)
        elif self._next is None and self.options.start is not None:
            self._send(AskKind.REPLAY, self.options.start, now_s)

    def _send(self, kind: AskKind, start: int, now_s: float) -> None:
        self._tied = False
        self._asks.send(kind, start, now_s=now_s)

    def _fail(self, problem: str, now_s: float) -> None:
        """The question came to nothing: again after a while, or not any more."""
        self._say(self.ask.kind.value if self.ask is not None else AskKind.REPLAY.value, problem)
        if not self._asks.fail(now_s=now_s):
            self._give_up(now_s)

    def _give_up(self, now_s: float) -> None:
        """Go on with what is live; a snapshot may mend it later."""
        self._asks.drop()
        self._asks.num_failed = 0
        self._wholeness.lose()
        self._proven = True
        self._refresh_at_s = now_s + self.options.retry_s
        while (first := self._buffer.first) is not None:
            if self._next is not None and first > self._next:
                self._accept_hole(first)
            topic, payload = self._buffer.take(first) or ("", b"")
            if self._next is None or first == self._next:
                self._apply(DeliveryKind.LIVE, first, topic, payload, now_s)
        self._behind = False

    def _refresh(self, now_s: float) -> None:
        self._refresh_at_s = None
        if self._wholeness.is_whole or not (self.options.snapshots and self._can_ask):
            return
        if self._asks.is_busy or not self.is_connected:
            self._refresh_at_s = now_s + self.options.retry_s
        else:
            self._asks.has_snapshots = None
            self._send(AskKind.SNAPSHOT, 0, now_s)

    # --- replay --------------------------------------------------------------------------------

    def _tie(self, message: PublishedBatch, now_s: float) -> bool:
        """Whether this first batch of an answer continues our state; if not, what follows has been begun."""
        assert self.ask is not None
        sequence = message.sequence
        if self._next is None:
            self._void()
            self._wholeness.lose()
            self._wholeness.is_whole = sequence == 0
            if sequence > self.ask.start:
                self._say("gap", "the replay begins later", first=self.ask.start, last=sequence - 1)
            self._next = sequence
        elif sequence < self.ask.start:
            return False
        elif sequence > self.ask.start:
            return self._unfillable(sequence, now_s)
        elif self._anchor is not None and message.payload != self._anchor[1]:
            self._restart("the publisher is another one", now_s)
            return False
        self._tied = True
        return True

    def _take_replayed(self, message: PublishedBatch, now_s: float) -> None:
        assert self._next is not None
        sequence = message.sequence
        held = self._buffer.batches.get(sequence)
        if held is not None:
            if held[1] == message.payload:
                self._proven = True
            elif not (_is_heartbeat(held[1]) and _is_heartbeat(message.payload)):
                self._other_live(now_s)
                return
        if sequence < self._next:
            return
        if sequence > self._next:
            if self._hole_at != self._next:
                # A ROUTER drops for a reader that is too slow: another try tells.
                self._hole_at = self._next
                self._fail(f"batches {self._next} to {sequence - 1} did not come", now_s)
                return
            if not self._unfillable(sequence, now_s):
                return
        self.counters.replayed_batches += 1
        self._apply(DeliveryKind.REPLAY, sequence, message.topic, message.payload, now_s)

    def _unfillable(self, sequence: int, now_s: float) -> bool:
        """No replay has what is before `sequence`. True when the hole is accepted and the answer goes on."""
        if self._asks.has_snapshots is not False:
            self._behind = True
            self._send(AskKind.SNAPSHOT, 0, now_s)
            return False
        if not self._tied:
            # Nothing ties what we have to this publisher.
            self._void()
        self._accept_hole(sequence)
        self._next = sequence
        self._tied = True
        return True

    def _replay_ended(self, now_s: float) -> None:
        self._asks.end()
        if self._next is None:
            if self._buffer.batches:
                self._fail("the replay is empty", now_s)
            return
        if not self._tied:
            if self._anchor is None:
                self._fail("the replay does not reach the live batches", now_s)
            else:
                self._restart("the publisher is behind what it sent before", now_s)
            return
        if not self._proven and self._ends_before_live():
            # What is live came after the question, or it is not this publisher's.
            self._asks.num_failed += 1
            if self._asks.num_failed >= self.options.max_attempts:
                self._other_live(now_s)
                return
        self._drain(now_s)

    def _ends_before_live(self) -> bool:
        return any(sequence >= (self._next or 0) for sequence in self._buffer.batches)

    def _restart(self, text: str, now_s: float) -> None:
        self.counters.restarts += 1
        self._say("restart", text, was=-1 if self._next is None else self._next - 1)
        self._void()
        self._wholeness.lose()
        self._buffer.clear()
        self._behind = False
        self._asks.drop()
        self._resync(now_s)

    def _other_live(self, now_s: float) -> None:
        """The live connection and the one for questions lead to two publishers: begin with new ones."""
        self._restart("live and replayed batches differ", now_s)
        self._fail("live and replayed batches differ", now_s)
        self._proven = False
        self.live_epoch += 1

    # --- snapshot ------------------------------------------------------------------------------

    def _snapshot_ended(self, meta: SnapshotMeta, now_s: float) -> None:
        self._asks.end()
        self._next = meta.sequence + 1
        self._wholeness.is_whole = meta.complete
        self._proven = False
        self._behind = False
        self._hole_at = None
        self._refresh_at_s = None
        self._say("snapshot", "taken" if meta.complete else "is not complete", sequence=meta.sequence)
        self._drain(now_s)

    def _snapshot_unsupported(self, now_s: float) -> None:
        self._asks.end()
        self._asks.has_snapshots = False
        self.counters.unsupported_snapshots += 1
        self._say("snapshot", "no answer, the publisher has none")
        if self._next is None or self._behind or not self._proven:
            self._resync(now_s)
        else:
            self._drain(now_s)

    # --- state ---------------------------------------------------------------------------------

    def _apply(self, kind: DeliveryKind, sequence: int, topic: str, payload: bytes, now_s: float) -> None:
        self._next = sequence + 1
        try:
            batch = decode_batch(payload, on_unknown=self._unknown)
        except DataLoss as error:
            self._anchor = sequence, payload
            self.counters.malformed += 1
            self._say("malformed", str(error), sequence=sequence)
            self._wholeness.lose()
            self._refresh_at_s = now_s
            return
        if batch.events:
            self._anchor = sequence, payload
        self._give(kind, sequence, topic, batch, len(payload))
        if self._wholeness.is_whole:
            self._refresh_at_s = None

    def _give(
        self,
        kind: DeliveryKind,
        sequence: int,
        topic: str,
        batch: KvEventBatch,
        num_bytes: int,
        unresolved: tuple[int, ...] = (),
    ) -> None:
        self._delivered = True
        self._wholeness.see(batch)
        self._deliver(Delivery(self.name, kind, sequence, topic, batch, num_bytes, unresolved))

    def _void(self) -> None:
        """What was delivered no longer counts."""
        last = self.sequence or 0
        self._next, self._anchor = None, None
        self._hole_at = None
        if self._delivered:
            cleared = KvEventBatch(0.0, (AllBlocksCleared(),))
            self._deliver(Delivery(self.name, DeliveryKind.CLEARED, last, "", cleared, 0))
            self._delivered = False
        self._wholeness.start()

    def _accept_hole(self, sequence: int) -> None:
        first = self._next if self._next is not None else 0
        self.counters.holes += 1
        self.counters.missing_batches += max(0, sequence - first)
        self._wholeness.lose()
        self._say("gap", f"{sequence - first} batches are missing", first=first, last=sequence - 1)
        self._next = sequence

    def _hear(self, now_s: float) -> None:
        self._heard_s = now_s
        self._is_silent = False

    def _watch_silence(self, now_s: float) -> None:
        silence_s = self.options.silence_s
        if not silence_s or self._heard_s is None or now_s < self._heard_s + silence_s:
            return
        if not self._is_silent:
            self._is_silent = True
            self.counters.silences += 1
            self._say("off", f"silent for {silence_s:g} s")
        if now_s >= self._heard_s + silence_s + self.options.drop_after_s and self._delivered:
            self.counters.drops += 1
            self._say("off", "its blocks are dropped")
            self._void()
            self._wholeness.lose()

    def _unknown(self, name: str) -> None:
        self.counters.unknown_events += 1
        self._say("unknown", f"event type {name!r}")

    def _say(self, kind: str, text: str, **facts: int | str) -> None:
        self._notify(Notice(self.name, kind, text, facts))


def _is_heartbeat(payload: bytes) -> bool:
    try:
        return not decode_batch(payload, on_unknown=lambda name: None).events
    except DataLoss:
        return False
