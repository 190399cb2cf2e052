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
from reprise_wire.event_asks import Asks
from reprise_wire.event_codec import PublishedBatch, decode_batch, is_heartbeat
from reprise_wire.event_deliveries import Deliveries
from reprise_wire.event_silence import Silence
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
        self._notify = notify
        self._can_ask = can_ask
        self._told = Deliveries(name, deliver, self._say, self.counters)
        self._asks = Asks(options, self.counters)
        self._proven = False
        self._behind = False
        """Live batches have shown that others are missing, or the connection was lost."""
        self._last_live: int | None = None
        self._buffer = LiveBuffer(options.buffer_batches, options.buffer_bytes)
        self._tied = False
        """The answer that comes in continues our state."""
        self._is_loose = False
        """It did so by its number alone, since a snapshot leaves no anchor. What it brought counts, and may
        become an anchor, once a batch of it is equal to a live one."""
        self._hole_at: int | None = None
        """Where the last replay had a hole: two of them at one place make it a lasting one."""
        self._refresh_at_s: float | None = None
        """When a partial source asks for a snapshot again."""
        self._silence = Silence(options)

    # --- what there is to see ------------------------------------------------------------------

    @property
    def ask(self) -> Ask | None:
        return self._asks.current

    @property
    def state(self) -> SourceState:
        if self._silence.is_off:
            return SourceState.OFF
        is_exact = self.is_complete and not self._behind and not self._is_loose
        return SourceState.EXACT if is_exact else SourceState.PARTIAL

    @property
    def sequence(self) -> int | None:
        """The last batch that was applied, or the sequence of the snapshot."""
        return None if self._told.next is None else self._told.next - 1

    @property
    def is_complete(self) -> bool:
        """What was delivered so far has no hole, whatever is missing after it."""
        return self._told.wholeness.is_whole and self._told.next is not None

    @property
    def is_following(self) -> bool:
        """Nothing is being asked for and nothing waits: batches are applied as they come."""
        return self.is_connected and not self._asks.is_busy and self._told.next is not None

    @property
    def num_buffered(self) -> int:
        return len(self._buffer.batches)

    @property
    def wake_s(self) -> float | None:
        """When `tick` has something to do at the latest; None = not before something comes."""
        asks = self._asks
        times = [asks.retry_at_s, self._refresh_at_s, asks.deadline_s if asks.current else None]
        times.append(self._silence.wake_s(has_blocks=self._told.are_any))
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
        self._behind = self._told.next is not None
        if self._told.anchor is None:
            # Nothing could tell whether another connection goes on from here.
            self._told.next = None
            self._told.wholeness.lose()
        if not self._can_ask:
            self._told.wholeness.lose()

    def live(self, message: PublishedBatch, *, now_s: float) -> None:
        self._silence.heard(now_s=now_s)
        self.counters.live_batches += 1
        sequence, former, after = message.sequence, self._last_live, self._told.next
        self._last_live = sequence
        descends = former is not None and sequence <= former
        if sequence == after and self._proven and not self._asks.is_busy:
            self._apply(DeliveryKind.LIVE, sequence, message.topic, message.payload, now_s)
        elif (descends or after is None or sequence > after) and self._told.starts_over(message):
            self._begin(message, descends, now_s)
        elif not self._can_ask:
            self._go_on_without_asking(message, descends, now_s)
        elif after is None and self._begins_anywhere:
            self._begin(message, False, now_s)
        else:
            self._hold(message, descends, now_s)

    def malformed(self, problem: str, *, now_s: float) -> None:
        """A live message that is none; if it was a batch, the next one shows a gap."""
        self._silence.heard(now_s=now_s)
        self.counters.malformed += 1
        self._say("malformed", problem)

    def replayed(self, ask_id: int, message: PublishedBatch | None, *, now_s: float) -> None:
        """One batch of the answer to a replay; None is its end."""
        if not self._asks.is_current(ask_id):
            return
        self._silence.heard(now_s=now_s)
        self._asks.answered(now_s=now_s)
        if message is None:
            self._replay_ended(now_s)
        elif self._tied or self._tie(message, now_s):
            self._take_replayed(message, now_s)

    def snapshot_part(self, ask_id: int, part: SnapshotChunk, *, now_s: float) -> None:
        if not self._asks.is_current(ask_id):
            return
        self._silence.heard(now_s=now_s)
        self._asks.answered(now_s=now_s)
        meta = part.meta
        if not self._asks.is_next_part(meta):
            self._fail(f"snapshot part {meta.index} is not the next one", now_s)
            return
        try:
            batch = decode_batch(part.payload, on_unknown=self._told.unknown_event)
        except DataLoss as error:
            self.counters.malformed += 1
            self._fail(str(error), now_s)
            return
        if meta.index == 0:
            self._told.start_over()
        self.counters.snapshot_parts += 1
        self._told.give(
            DeliveryKind.SNAPSHOT, meta.sequence, meta.topic, batch, len(part.payload), meta.unresolved
        )
        # The cleared event of its first part makes nothing whole before the last one is there.
        self._told.wholeness.lose()
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

    def _begin(self, message: PublishedBatch, descends: bool, now_s: float) -> None:
        """With this live batch, whatever was before. A number that went down on one connection leaves
        open whose the next one is."""
        if descends or (self._told.next is not None and message.sequence < self._told.next):
            self._see_restart("the publisher began anew", now=message.sequence)
        self._void()
        self._asks.drop()
        if descends:
            self._buffer.clear()
        self._buffer.drop_before(message.sequence + 1)
        self._proven = not (descends and self._can_ask)
        if self._told.starts_over(message):
            self._told.wholeness.is_whole = True
            self._refresh_at_s = None
        self._apply(DeliveryKind.LIVE, message.sequence, message.topic, message.payload, now_s)
        self._drain(now_s)

    def _go_on_without_asking(self, message: PublishedBatch, descends: bool, now_s: float) -> None:
        if descends:
            self._see_restart("the publisher began anew", now=message.sequence)
            self._void()
            self._told.next = 0
        if self._told.next is not None and message.sequence > self._told.next:
            self.counters.gaps += 1
            self._told.accept_hole(message.sequence)
        self._proven = True
        self._behind = False
        self._apply(DeliveryKind.LIVE, message.sequence, message.topic, message.payload, now_s)

    def _hold(self, message: PublishedBatch, descends: bool, now_s: float) -> None:
        """Keep a live batch until what comes before it, or its proof, is there."""
        sequence, after = message.sequence, self._told.next
        if after is not None and sequence < after and not descends and not self._asks.is_busy:
            self.counters.duplicates += 1
            return
        if descends:
            # What came before it on this connection is another publisher's, or a repeat.
            self._proven = False
            self._buffer.clear()
        self._see_gap(sequence)
        if self._asks.awaits_snapshot and self._proven and sequence == self._told.next:
            # It is applied now, and again should the snapshot turn out to be older.
            self._apply(DeliveryKind.LIVE, sequence, message.topic, message.payload, now_s)
        if not self._buffer.add(sequence, message.topic, message.payload):
            self.counters.overflows += 1
            self._behind = self._told.next is None or self._told.next <= sequence
            self._say("overflow", "the buffer of live batches was full and is dropped", last=sequence)
        if not self._asks.is_busy:
            self._resync(now_s)

    def _see_gap(self, sequence: int) -> None:
        first = self._told.next
        if first is None or sequence <= first or sequence - 1 in self._buffer.batches:
            return
        if not self._behind:
            self.counters.gaps += 1
            self._say("behind", "batches are missing, asking for them", first=first, last=sequence - 1)
        self._behind = True

    def _drain(self, now_s: float) -> None:
        """Apply what was held back and is next now; ask again for what is still missing."""
        if self._told.next is None:
            return
        if not self._told.wholeness.is_whole and self._refresh_at_s is None:
            self._refresh_at_s = now_s + self.options.retry_s
        self.counters.duplicates += self._buffer.drop_before(self._told.next)
        if self._proven:
            while (held := self._buffer.take(self._told.next)) is not None:
                self._apply(DeliveryKind.LIVE, self._told.next, *held, now_s)
        if not self._buffer.batches:
            self._behind = False
            if self._proven:
                self._asks.num_failed = 0
            return
        self._behind = self._buffer.first != self._told.next
        self._resync(now_s)

    # --- asking --------------------------------------------------------------------------------

    def _resync(self, now_s: float) -> None:
        """Ask for what leads from what we have to what is live."""
        if not self._can_ask or not self.is_connected:
            return
        after, anchor = self._told.next, self._told.anchor
        if after is not None and (anchor is not None or self._buffer.batches):
            self._send(AskKind.REPLAY, after if anchor is None else anchor[0], now_s)
        elif self._asks.has_snapshots is not False:
            self._send(AskKind.SNAPSHOT, 0, now_s)
        elif after is None and self.options.start is not None:
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
        self._told.wholeness.lose()
        self._proven = True
        self._refresh_at_s = now_s + self.options.retry_s
        while (first := self._buffer.first) is not None:
            if self._told.next is not None and first > self._told.next:
                self._told.accept_hole(first)
            topic, payload = self._buffer.take(first) or ("", b"")
            if self._told.next is None or first == self._told.next:
                self._apply(DeliveryKind.LIVE, first, topic, payload, now_s)
        self._behind = False

    def _refresh(self, now_s: float) -> None:
        self._refresh_at_s = None
        if self._told.wholeness.is_whole or not (self.options.snapshots and self._can_ask):
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
        if self._told.next is None:
            self._void()
            self._told.wholeness.is_whole = sequence == 0
            if sequence > self.ask.start:
                self._say("gap", "the replay begins later", first=self.ask.start, last=sequence - 1)
            self._told.next = sequence
        elif sequence < self.ask.start:
            return False
        elif sequence > self.ask.start:
            return self._unfillable(sequence, now_s)
        elif self._told.anchor is not None and message.payload != self._told.anchor[1]:
            self._restart("the publisher is another one", now_s)
            return False
        else:
            self._is_loose = self._told.anchor is None and not self._proven
        self._tied = True
        return True

    def _take_replayed(self, message: PublishedBatch, now_s: float) -> None:
        assert self._told.next is not None
        sequence = message.sequence
        held = self._buffer.batches.get(sequence)
        if held is not None:
            if held[1] == message.payload:
                self._proven, self._is_loose = True, False
            elif not (is_heartbeat(held[1]) and is_heartbeat(message.payload)):
                self._other_live(now_s)
                return
        if sequence < self._told.next:
            return
        if sequence > self._told.next:
            if self._hole_at != self._told.next:
                # A ROUTER drops for a reader that is too slow: another try tells.
                self._hole_at = self._told.next
                self._fail(f"batches {self._told.next} to {sequence - 1} did not come", now_s)
                return
            if not self._unfillable(sequence, now_s):
                return
        self.counters.replayed_batches += 1
        self._apply(DeliveryKind.REPLAY, sequence, message.topic, message.payload, now_s)
        if self._is_loose:
            self._told.anchor = None

    def _unfillable(self, sequence: int, now_s: float) -> bool:
        """No replay has what is before `sequence`. True when the hole is accepted and the answer goes on."""
        if self._asks.has_snapshots is not False:
            self._behind = True
            self._send(AskKind.SNAPSHOT, 0, now_s)
            return False
        if not self._tied:
            # Nothing ties what we have to this publisher.
            self._void()
        self._told.accept_hole(sequence)
        self._told.next = sequence
        self._tied = True
        return True

    def _replay_ended(self, now_s: float) -> None:
        self._asks.end()
        if self._told.next is None:
            if self._buffer.batches:
                self._fail("the replay is empty", now_s)
            return
        if not self._tied:
            if self._told.anchor is None:
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
        return any(sequence >= (self._told.next or 0) for sequence in self._buffer.batches)

    def _restart(self, text: str, now_s: float) -> None:
        self._see_restart(text)
        self._void()
        self._buffer.clear()
        self._behind = False
        self._asks.drop()
        self._resync(now_s)

    def _see_restart(self, text: str, **facts: int) -> None:
        self.counters.restarts += 1
        self._say("restart", text, was=-1 if self.sequence is None else self.sequence, **facts)

    def _other_live(self, now_s: float) -> None:
        """The live connection and the one for questions lead to two publishers: begin with new ones."""
        self._restart("live and replayed batches differ", now_s)
        self._fail("live and replayed batches differ", now_s)
        self._proven = False
        self.live_epoch += 1

    # --- snapshot ------------------------------------------------------------------------------

    def _snapshot_ended(self, meta: SnapshotMeta, now_s: float) -> None:
        self._asks.end()
        self._told.next = meta.sequence + 1
        self._told.wholeness.is_whole = meta.complete
        self._proven = False
        self._behind = False
        self._hole_at, self._is_loose = None, False
        self._refresh_at_s = None
        self._say("snapshot", "taken" if meta.complete else "is not complete", sequence=meta.sequence)
        self._drain(now_s)

    def _snapshot_unsupported(self, now_s: float) -> None:
        self._asks.end()
        self._asks.has_snapshots = False
        self.counters.unsupported_snapshots += 1
        self._say("snapshot", "no answer, the publisher has none")
        if self._told.next is None or self._behind or not self._proven:
            self._resync(now_s)
        else:
            self._drain(now_s)

    # --- state ---------------------------------------------------------------------------------

    def _apply(self, kind: DeliveryKind, sequence: int, topic: str, payload: bytes, now_s: float) -> None:
        if not self._told.take(kind, sequence, topic, payload):
            self._refresh_at_s = now_s
        elif self._told.wholeness.is_whole:
            self._refresh_at_s = None

    def _void(self) -> None:
        self._hole_at, self._is_loose = None, False
        self._told.void()

    def _watch_silence(self, now_s: float) -> None:
        if self._silence.begins(now_s=now_s):
            self.counters.silences += 1
            self._say("off", f"silent for {self.options.silence_s:g} s")
        if self._silence.drops(now_s=now_s) and self._told.are_any:
            self.counters.drops += 1
            self._say("off", "its blocks are dropped")
            self._void()

    def _say(self, kind: str, text: str, **facts: int | str) -> None:
        self._notify(Notice(self.name, kind, text, facts))
