"""From the sockets' thread to the readers of the gRPC stream, without holding it up.

Numbers: a stream's sequence number is the published one plus `base`, which is drawn from the clock when
the process starts. So a cursor tells whose it is: one of an earlier process is never taken for ours,
0 is nobody's, and a snapshot has room for as many chunks as it needs below its own number.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import time
from typing import Protocol

from smg_grpc_proto.generated import common_pb2 as pb

from reprise_core.errors import DataLoss, Exhausted
from reprise_core.kv_events import KvEventBatch
from reprise_publisher.kv_event_proto import Untellable, event_to_proto
from reprise_publisher.kv_event_snapshot import FrozenState
from reprise_publisher.metrics import PublisherMetrics
from reprise_wire.event_codec import decode_batch

MAX_MESSAGE_BYTES = 3 * 1024 * 1024
"""gRPC clients take 4 MiB by default; a reader gets a snapshot, in chunks, instead of a larger batch."""
HANDOVER_BATCHES, HANDOVER_BYTES = 10_000, 64 * 1024 * 1024
"""On their way from the sockets' thread; more are dropped, and the readers see a gap."""
BURST_BATCHES = 128
"""Batches made into messages before other work of the loop has its turn."""
BASE_SHIFT = 20
"""Milliseconds of the clock are above these bits: room for a billion batches per second of life."""
EVENT_ID_SHIFT = 16
REMEMBERED_SNAPSHOTS = 256

OnBatch = Callable[[int, bytes, KvEventBatch], None]


class EventSource(Protocol):
    """The published stream as the gRPC side needs it; every method may be called from any thread."""

    def freeze_now(self) -> tuple[int, FrozenState, bool]:
        """The number of the last batch, the state after it, and whether that is all there is."""

    def subscribe(self, callback: OnBatch) -> Callable[[], None]:
        """`callback` gets every later batch in the sockets' thread, with the tokens of its blocks where
        they are known; the answer undoes it."""

    def published_after(self, sequence: int) -> Sequence[tuple[int, bytes]]:
        """What is kept of the batches after `sequence`, in order."""

    @property
    def last_sequence(self) -> int: ...

    @property
    def complete(self) -> bool:
        """Nothing is known to be missing."""


@dataclass(frozen=True, slots=True)
class FeedOptions:
    rank: int
    readers: int
    """Readers at once; more are refused."""
    queue_batches: int
    """Batches and bytes that wait for one reader; beyond either it gets a snapshot instead."""
    queue_bytes: int
    needs_tokens: bool = True


@dataclass(frozen=True, slots=True)
class FeedEntry:
    number: int
    message: pb.KvEventBatch | None
    """None: too large to be sent."""
    num_bytes: int


class FeedReader:
    """What waits for one reader. Overrun: the queue was full, is empty now, and takes no more until the
    reader restarts it."""

    def __init__(self, options: FeedOptions) -> None:
        self._options = options
        self._queue: deque[FeedEntry] = deque()
        self._num_bytes = 0
        self._overrun = False
        self._arrived = asyncio.Event()

    def restart(self) -> None:
        self._queue.clear()
        self._num_bytes = 0
        self._overrun = False

    def offer(self, entry: FeedEntry) -> None:
        if self._overrun:
            return
        self._queue.append(entry)
        self._num_bytes += entry.num_bytes
        options = self._options
        if len(self._queue) > options.queue_batches or self._num_bytes > options.queue_bytes:
            self.restart()
            self._overrun = True
        self._arrived.set()

    async def take(self) -> FeedEntry | None:
        """The next entry; None after an overrun."""
        while not self._queue:
            if self._overrun:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        entry = self._queue.popleft()
        self._num_bytes -= entry.num_bytes
        return entry


class KvEventFeed:
    """One per process. Batches are made into messages once for all readers, and only while there are any."""

    def __init__(
        self,
        source: EventSource,
        options: FeedOptions,
        metrics: PublisherMetrics,
        *,
        clock: Callable[[], float] = time,
    ) -> None:
        self._source = source
        self._options = options
        self._metrics = metrics
        self._base = int(clock() * 1000) << BASE_SHIFT
        self._readers: set[FeedReader] = set()
        self._snapshots: deque[tuple[int, int]] = deque()
        self._handover: deque[tuple[int, int, KvEventBatch]] = deque()
        """Sequence, bytes, batch."""
        # Each is written by one thread alone, so their difference needs no lock.
        self._bytes_in = 0
        self._bytes_out = 0
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsubscribe: Callable[[], None] | None = None

    @property
    def options(self) -> FeedOptions:
        return self._options

    def attach(self) -> FeedReader:
        """Raises Exhausted."""
        if len(self._readers) >= self._options.readers:
            self._metrics.rpc_refused.labels("limit").inc()
            raise Exhausted(f"{len(self._readers)} readers of the event stream, at most as many")
        reader = FeedReader(self._options)
        self._readers.add(reader)
        self._metrics.rpc_readers.set(len(self._readers))
        if self._unsubscribe is None:
            self._loop = asyncio.get_running_loop()
            self._unsubscribe = self._source.subscribe(self._hand_over)
        return reader

    def detach(self, reader: FeedReader) -> None:
        self._readers.discard(reader)
        self._metrics.rpc_readers.set(len(self._readers))
        if not self._readers and self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    def history(self, cursor: int) -> tuple[Sequence[tuple[int, bytes]], str]:
        """The batches after a cursor; or why it takes a snapshot: `fresh` (it has nothing), `foreign` (the
        cursor is not of this process), `partial` (it may be a chunk's), `behind` (some batches are gone)."""
        if cursor == 0:
            return (), "fresh"
        if any(first <= cursor < last for first, last in self._snapshots):
            return (), "partial"
        sequence, last = cursor - self._base, self._source.last_sequence
        if not 0 <= sequence <= last:
            return (), "foreign"
        kept = self._source.published_after(sequence)
        complete = all(kept_sequence == sequence + 1 + i for i, (kept_sequence, _) in enumerate(kept))
        if not complete or sequence + len(kept) < last:
            return (), "behind"
        return kept, ""

    @property
    def complete(self) -> bool:
        return self._source.complete

    async def freeze(self) -> tuple[int, FrozenState, bool]:
        """The number of the stream's last batch, the state after it, and whether it is complete."""
        sequence, state, complete = await asyncio.to_thread(self._source.freeze_now)
        return self._base + sequence, state, complete

    def past_entry(self, sequence: int, payload: bytes) -> FeedEntry | None:
        """An entry of history; None when it cannot be told in full, which calls for a snapshot."""
        left_out: list[str] = []
        try:
            entry = self._entry(sequence, decode_batch(payload, on_unknown=left_out.append), left_out.append)
        except DataLoss:
            return None
        return None if left_out else entry

    def note_snapshot(self, first: int, last: int) -> None:
        """Chunks take numbers that batches had. Whoever comes back with one of those before the last may
        have stopped within the snapshot. Beyond REMEMBERED_SNAPSHOTS, what lies between the two oldest is
        held against a cursor as well, which costs it no more than another snapshot."""
        if first == last:
            return
        self._snapshots.append((first, last))
        if len(self._snapshots) > REMEMBERED_SNAPSHOTS:
            one, other = self._snapshots.popleft(), self._snapshots.popleft()
            self._snapshots.appendleft((min(one[0], other[0]), max(one[1], other[1])))

    def left_out(self, cause: str) -> None:
        self._metrics.rpc_events_left_out.labels(cause).inc()

    def _hand_over(self, sequence: int, payload: bytes, batch: KvEventBatch) -> None:
        """In the sockets' thread."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        num_waiting_bytes = self._bytes_in - self._bytes_out
        if len(self._handover) >= HANDOVER_BATCHES or num_waiting_bytes > HANDOVER_BYTES:
            self._metrics.rpc_batches_dropped.inc()
            return
        self._bytes_in += len(payload)
        self._handover.append((sequence, len(payload), batch))
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon_threadsafe(self._distribute)

    def _distribute(self) -> None:
        self._scheduled = False
        for _ in range(BURST_BATCHES):
            if not self._handover:
                return
            sequence, num_bytes, batch = self._handover.popleft()
            self._bytes_out += num_bytes
            if self._readers:
                entry = self._entry(sequence, batch, self.left_out)
                for reader in self._readers:
                    reader.offer(entry)
        if self._handover and not self._scheduled:
            self._scheduled = True
            assert self._loop is not None
            self._loop.call_soon(self._distribute)

    def _entry(self, sequence: int, batch: KvEventBatch, on_left_out: Callable[[str], None]) -> FeedEntry:
        events: list[pb.KvCacheEvent] = []
        for index, event in enumerate(batch.events):
            event_id = (sequence << EVENT_ID_SHIFT) + index + 1
            try:
                events.append(
                    event_to_proto(event, event_id=event_id, needs_tokens=self._options.needs_tokens)
                )
            except Untellable as problem:
                on_left_out(problem.cause)
        rank = batch.data_parallel_rank
        number = self._base + sequence
        message = pb.KvEventBatch(
            sequence_number=number,
            timestamp=batch.ts,
            events=events,
            dp_rank=self._options.rank if rank is None else rank,
        )
        num_bytes = message.ByteSize()
        return FeedEntry(number, message if num_bytes <= MAX_MESSAGE_BYTES else None, num_bytes)
