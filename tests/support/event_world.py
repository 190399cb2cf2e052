"""A publisher, the network and time, simulated around one `EventSource`; nothing here is a socket.

What a delivery says is compared with the truth by its timestamp: every batch, and every snapshot, has
one of its own, and the truth after it is remembered.
"""

import random
from collections import Counter, deque

from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from reprise_wire.event_codec import PublishedBatch, decode_batch, encode_batch
from reprise_wire.event_facts import EventFacts, Fact
from reprise_wire.event_snapshot import SnapshotChunk, SnapshotMeta
from reprise_wire.event_source import EventSource
from reprise_wire.event_source_values import AskKind, Delivery, Notice, SourceOptions, SourceState

SIZE = 2
Truth = Counter[Fact]


class Publisher:
    """One incarnation: numbers from 0, a ring, and the truth."""

    def __init__(self, world: "EventWorld") -> None:
        self._world = world
        self.log: list[tuple[int, bytes]] = []
        self.next_sequence = 0
        self.truth: Truth = Counter()
        self.knows_all = True
        self.parents: dict[int, int | None] = {}

    def publish(self, *events: KvEvent) -> PublishedBatch:
        world = self._world
        for event in events:
            self._account(event)
        world.ts += 1.0
        world.truths[world.ts] = self.truth.copy()
        payload = encode_batch(KvEventBatch(world.ts, events, 0))
        message = PublishedBatch("t", self.next_sequence, payload)
        self.log.append((self.next_sequence, payload))
        self.next_sequence += 1
        return message

    def ring(self) -> list[tuple[int, bytes]]:
        """Heartbeats in a row are one entry, and all come with the payload of the last."""
        runs: list[list[tuple[int, bytes]]] = []
        for sequence, payload in self.log:
            is_heartbeat = not decode_batch(payload).events
            if is_heartbeat and runs and runs[-1][-1][0] == sequence - 1 and self._is_run(runs[-1]):
                runs[-1].append((sequence, payload))
            else:
                runs.append([(sequence, payload)])
        kept = runs[-self._world.ring_batches :] if self._world.ring_batches else []
        return [(sequence, run[-1][1]) for run in kept for sequence, _ in run]

    def _is_run(self, run: list[tuple[int, bytes]]) -> bool:
        return not decode_batch(run[0][1]).events

    def snapshot(self, chunk_blocks: int) -> list[SnapshotChunk]:
        world = self._world
        world.ts += 1.0
        world.truths[world.ts] = self.truth.copy()
        events = [
            stored(fact.block_hash, self.parents.get(fact.block_hash), fact.medium)
            for fact, count in self.truth.items()
            for _ in range(count)
        ]
        pieces = [events[at : at + chunk_blocks] for at in range(0, len(events), chunk_blocks)] or [[]]
        return [
            SnapshotChunk(
                SnapshotMeta(
                    topic="t",
                    rank=0,
                    index=index,
                    last=index == len(pieces) - 1,
                    sequence=self.next_sequence - 1,
                    num_blocks=len(events),
                    num_unresolved=0,
                    complete=self.knows_all,
                ),
                encode_batch(KvEventBatch(world.ts, (*(() if index else (AllBlocksCleared(),)), *piece), 0)),
            )
            for index, piece in enumerate(pieces)
        ]

    def _account(self, event: KvEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.truth.clear()
            return
        for block_hash in event.block_hashes:
            fact = Fact(block_hash, 0, event.medium or "GPU")
            if isinstance(event, BlockStored):
                self.truth[fact] += 1
                self.parents[int(block_hash)] = event.parent_block_hash  # type: ignore[assignment]
            else:
                self.truth[fact] -= 1
                if not self.truth[fact]:
                    del self.truth[fact]


def stored(block_hash: int, parent: int | None, medium: str = "GPU") -> BlockStored:
    return BlockStored(
        block_hashes=(block_hash,),
        parent_block_hash=parent,
        token_ids=(block_hash, 1),
        block_size=SIZE,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=0,
    )


class EventWorld:
    """`snapshots`: whether the publisher knows them; `clears`: whether sequence 0 is AllBlocksCleared."""

    def __init__(
        self,
        rng: random.Random,
        *,
        snapshots: bool = True,
        clears: bool = True,
        replay: bool = True,
        ring_batches: int = 20,
        options: SourceOptions | None = None,
    ) -> None:
        self.rng = rng
        self.snapshots = snapshots
        self.clears = clears
        self.ring_batches = ring_batches
        self.ts = 0.0
        self.truths: dict[float, Truth] = {}
        self.now_s = 100.0
        self.deliveries: list[Delivery] = []
        self.notices: list[Notice] = []
        self.facts = EventFacts(limit_blocks=100_000)
        self.source = EventSource(
            "s",
            can_ask=replay,
            deliver=self._take,
            notify=self.notices.append,
            options=options
            or SourceOptions(snapshot_answer_s=1, answer_s=2, retry_s=5, buffer_batches=12, max_attempts=4),
        )
        self.publisher = Publisher(self)
        self.pipe: deque[PublishedBatch] = deque()
        self.is_up = False
        """The live connection leads to `linked`, which may be an incarnation that is dead by now."""
        self.linked: Publisher | None = None
        self._answer: deque[PublishedBatch | SnapshotChunk | None] = deque()
        self._answered_id = 0
        self._live_epoch = 0
        self._next_hash = 0
        if clears:
            self.publish(AllBlocksCleared())

    def _take(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)
        self.facts.apply(delivery)

    # --- the publisher ---------------------------------------------------------------------------

    def publish(self, *events: KvEvent, lost: bool = False) -> None:
        message = self.publisher.publish(*events)
        if self.is_up and self.linked is self.publisher and not lost:
            self.pipe.append(message)

    def random_events(self) -> list[KvEvent]:
        publisher, rng = self.publisher, self.rng
        events: list[KvEvent] = []
        for _ in range(rng.randint(0, 3)):
            held = list(publisher.truth)
            if held and rng.random() < 0.45:
                fact = rng.choice(held)
                event: KvEvent = BlockRemoved(
                    block_hashes=(fact.block_hash,), medium=fact.medium, group_idx=0
                )
            else:
                twin = bool(held) and rng.random() < 0.2
                self._next_hash += 1
                block_hash = rng.choice(held).block_hash if twin else self._next_hash
                parent = publisher.parents.get(int(block_hash)) if twin else self._some_parent()
                event = stored(int(block_hash), parent, rng.choice(["GPU", "GPU", "CPU"]))
            publisher._account(event)
            events.append(event)
        # They are accounted for again when the batch is published.
        for event in reversed(events):
            fact = Fact(event.block_hashes[0], 0, event.medium or "GPU")  # type: ignore[union-attr]
            publisher.truth[fact] += 1 if isinstance(event, BlockRemoved) else -1
            if not publisher.truth[fact]:
                del publisher.truth[fact]
        return events

    def _some_parent(self) -> int | None:
        held = list(self.publisher.truth)
        return int(self.rng.choice(held).block_hash) if held and self.rng.random() < 0.7 else None

    def skip_number(self) -> None:
        """A batch that the publisher itself never got: it does not know what was in it."""
        for event in self.random_events():
            self.publisher._account(event)
        self.publisher.next_sequence += 1
        self.publisher.knows_all = False

    def restart(self, *, notices: bool = True) -> None:
        """Another incarnation. With `notices`, the live connection breaks at once; else it stalls."""
        self.publisher = Publisher(self)
        if self.clears:
            self.publish(AllBlocksCleared())
        if notices:
            self.disconnect()

    # --- the live connection ---------------------------------------------------------------------

    def connect(self) -> None:
        if not self.is_up:
            self.is_up, self.linked = True, self.publisher
            self.source.connected(now_s=self.now_s)

    def disconnect(self) -> None:
        """Nothing of this connection comes any more."""
        if self.is_up:
            self.is_up, self.linked = False, None
            self.pipe.clear()
            self.source.disconnected(now_s=self.now_s)

    def lose(self, index: int) -> None:
        if self.pipe:
            del self.pipe[index % len(self.pipe)]

    def duplicate(self, index: int) -> None:
        if self.pipe:
            self.pipe.insert(index % len(self.pipe) + 1, self.pipe[index % len(self.pipe)])

    def arrive(self, number: int) -> None:
        for _ in range(min(number, len(self.pipe))):
            self.source.live(self.pipe.popleft(), now_s=self.now_s)
            self.check()
            self._follow_epoch()

    def _follow_epoch(self) -> None:
        if self.source.live_epoch != self._live_epoch:
            self._live_epoch = self.source.live_epoch
            self.disconnect()

    # --- answers ---------------------------------------------------------------------------------

    def answer(self, number: int, *, drop: bool = False) -> None:
        """Up to `number` messages of the present answer arrive; it is made when the first does."""
        ask = self.source.ask
        if ask is None:
            return
        if ask.ask_id != self._answered_id:
            self._answered_id = ask.ask_id
            self._answer = self._make_answer(ask.kind, ask.start)
        for _ in range(min(number, len(self._answer))):
            message = self._answer.popleft()
            if drop:
                drop = False
                continue
            if isinstance(message, SnapshotChunk):
                self.source.snapshot_part(ask.ask_id, message, now_s=self.now_s)
            else:
                self.source.replayed(ask.ask_id, message, now_s=self.now_s)
            self.check()
            self._follow_epoch()

    def _make_answer(self, kind: AskKind, start: int) -> "deque[PublishedBatch | SnapshotChunk | None]":
        if kind is AskKind.SNAPSHOT:
            return deque(self.publisher.snapshot(2) if self.snapshots else ())
        batches = [
            PublishedBatch("t", number, load) for number, load in self.publisher.ring() if number >= start
        ]
        return deque([*batches, None])

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.source.tick(now_s=self.now_s)
        wake_s = self.source.wake_s
        assert wake_s is None or wake_s > self.now_s, "it would be woken again and again"
        self.check()

    # --- judging ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Whoever says exact has the truth of the moment that its last batch is of."""
        if self.source.state is not SourceState.EXACT:
            return
        assert self.deliveries, "exact, and nothing was ever delivered"
        last = self.deliveries[-1]
        assert last.sequence == self.source.sequence
        assert self.copies() == self.truths[last.batch.ts], f"not the truth at {last.sequence}"

    def copies(self) -> Truth:
        return self.facts.copies("s")

    def settle(self, rounds: int = 60) -> None:
        """The faults end: the connection stands, everything is answered, heartbeats come."""
        for _ in range(rounds):
            self.connect()
            self.publish()
            self.arrive(1000)
            self.answer(10_000)
            self.pass_time(0.5)
            if self.is_settled():
                return

    def is_settled(self) -> bool:
        source = self.source
        return (
            source.state is SourceState.EXACT
            and source.is_following
            and source.sequence == self.publisher.next_sequence - 1
        )
