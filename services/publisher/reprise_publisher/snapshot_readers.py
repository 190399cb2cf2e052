"""Snapshots in progress: each reader gets the state of one moment, at its own pace, and holds up nobody."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import time

from reprise_core.kv_events import AllBlocksCleared, KvEvent, KvEventBatch
from reprise_publisher.metrics import PublisherMetrics
from reprise_publisher.outgoing import Outgoing
from reprise_publisher.replay_readers import Send, Sent
from reprise_publisher.stream import FrozenStream
from reprise_wire.event_snapshot import (
    SNAPSHOT_VERSION,
    SnapshotChunk,
    SnapshotMeta,
    SnapshotRequest,
    snapshot_chunk_frames,
    snapshot_refusal_frames,
)

BLOCKS_PER_EVENT = 128
BLOCKS_PER_CHUNK = 512
"""Making a chunk takes a millisecond or two, in which nothing is published."""


@dataclass
class _Reader:
    chunks: Iterator[SnapshotChunk]
    pending: SnapshotChunk | None
    """What is to be sent next."""
    progress_s: float


class SnapshotReaders:
    """At most `limit` at once, each with its own copy of the record; more are refused. A new request of
    a reader replaces the old one. One that takes nothing for `stall_s` is given up."""

    def __init__(
        self,
        freeze: Callable[[], FrozenStream],
        outgoing: Outgoing,
        *,
        topic: str,
        rank: int,
        limit: int,
        stall_s: float,
        send: Send,
        metrics: PublisherMetrics,
    ) -> None:
        self._freeze = freeze
        self._outgoing = outgoing
        self._topic = topic
        self._rank = rank
        self._limit = limit
        self._stall_s = stall_s
        self._send = send
        self._metrics = metrics
        self._readers: dict[bytes, _Reader] = {}

    def __len__(self) -> int:
        return len(self._readers)

    def request(self, request: SnapshotRequest, *, now_s: float) -> None:
        refusal = ""
        if request.version != SNAPSHOT_VERSION:
            refusal = f"version {request.version}, this publisher speaks {SNAPSHOT_VERSION}"
        elif request.identity not in self._readers and len(self._readers) >= self._limit:
            refusal = f"busy: {self._limit} snapshots are being read, at most as many"
        self._metrics.snapshots.labels("refused" if refusal else "accepted").inc()
        if refusal:
            self._send(snapshot_refusal_frames(request.identity, refusal))
            return
        chunks = self._chunks(self._freeze())
        self._readers[request.identity] = _Reader(chunks, next(chunks), now_s)

    def advance(self, *, now_s: float) -> bool:
        """One chunk for each reader. True when some reader could take more at once."""
        more = False
        for identity, reader in list(self._readers.items()):
            assert reader.pending is not None
            outcome = self._send(snapshot_chunk_frames(identity, reader.pending))
            if outcome is Sent.DONE:
                reader.progress_s = now_s
                reader.pending = next(reader.chunks, None)
                more = more or reader.pending is not None
                if reader.pending is None:
                    del self._readers[identity]
            elif outcome is Sent.GONE or now_s - reader.progress_s > self._stall_s:
                self._metrics.snapshots.labels("given_up").inc()
                del self._readers[identity]
        return more

    def _chunks(self, frozen: FrozenStream) -> Iterator[SnapshotChunk]:
        """Told as it goes on; the last one says so."""
        states = frozen.stores(BLOCKS_PER_EVENT)
        state, index = next(states, None), 0
        events: list[KvEvent] = [AllBlocksCleared()]
        while True:
            unresolved: list[int] = []
            num_blocks = 0
            while state is not None and num_blocks < BLOCKS_PER_CHUNK:
                if not state.resolved:
                    unresolved.append(len(events))
                events.append(state.event)
                num_blocks += len(state.event.block_hashes)
                state = next(states, None)
            yield self._chunk(frozen, index, events, unresolved, last=state is None)
            if state is None:
                return
            index += 1
            events = []

    def _chunk(
        self,
        frozen: FrozenStream,
        index: int,
        events: list[KvEvent],
        unresolved: list[int],
        *,
        last: bool,
    ) -> SnapshotChunk:
        meta = SnapshotMeta(
            topic=self._topic,
            rank=self._rank,
            index=index,
            last=last,
            sequence=frozen.sequence,
            num_blocks=frozen.record.num_blocks,
            num_unresolved=frozen.record.num_unresolved,
            complete=frozen.complete,
            unresolved=tuple(unresolved),
        )
        batch = KvEventBatch(time(), tuple(events), self._rank)
        return SnapshotChunk(meta, self._outgoing.encode(batch))
