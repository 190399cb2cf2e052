"""The record of what was published, which comes after publishing: it costs ten times as much."""

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

import msgspec

from reprise_core.block_record import BlockRecord
from reprise_core.errors import DataLoss
from reprise_core.kv_events import AllBlocksCleared, BlockStored, ExternalHash, KvEvent, KvEventBatch
from reprise_publisher.kv_event_proto import lacks_tokens
from reprise_publisher.metrics import PublisherMetrics
from reprise_publisher.outgoing import Outgoing
from reprise_wire.event_codec import decode_batch, with_rank

SLICE_BYTES = 16 * 1024
"""Recorded in one go, a millisecond or so, before new batches have their turn."""

OnPublished = Callable[[int, bytes, KvEventBatch], None]


class _Published(NamedTuple):
    sequence: int
    payload: bytes
    """As it was published."""
    source: bytes
    """As the source sent it."""
    published_s: float


class RecordKeeper:
    """Batches wait here, in order, until there is time to record them; at `limit_bytes` the oldest are
    recorded before another one is published. Listeners hear of a batch when it is recorded.

    Invariant: the record is the state after `sequence`, and what waits are the batches after that.
    """

    def __init__(
        self,
        record: BlockRecord,
        outgoing: Outgoing,
        *,
        rank: int,
        limit_bytes: int,
        metrics: PublisherMetrics,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.record = record
        """Of what the source said, before anything is left out of it."""
        self._outgoing = outgoing
        self._rank = rank
        self._limit_bytes = limit_bytes
        self._metrics = metrics
        self._clock = clock
        self._waiting: deque[_Published] = deque()
        self._listeners: list[OnPublished] = []
        self._knows_all = True
        self._known_since = 0
        self.sequence = -1
        self.num_waiting_bytes = 0
        self.damaged = False
        """A batch could not be read, and nothing has made up for it."""

    @property
    def knows_all(self) -> bool:
        return self._knows_all

    def set_knows_all(self, knows_all: bool, *, since: int) -> None:
        """What waits from before `since` does not change it any more."""
        self._knows_all, self._known_since = knows_all, since

    def listen(self, listener: OnPublished) -> None:
        """Called with number, payload and batch of what is recorded from now on, with the tokens of stored
        blocks where the record has them, and without reports of blocks that were known; must not raise."""
        self._listeners = [*self._listeners, listener]

    def unlisten(self, listener: OnPublished) -> None:
        self._listeners = [other for other in self._listeners if other is not listener]

    def add(self, sequence: int, payload: bytes, source: bytes) -> None:
        self._waiting.append(_Published(sequence, payload, source, self._clock()))
        self.num_waiting_bytes += len(source)
        while self.num_waiting_bytes > self._limit_bytes:
            self._record_next()

    @property
    def is_behind(self) -> bool:
        return bool(self._waiting)

    def lag_s(self, now_s: float) -> float:
        """How long ago the first batch that waits was published."""
        return now_s - self._waiting[0].published_s if self._waiting else 0.0

    def advance(self) -> None:
        """Records a slice of what waits."""
        stop_at = self.num_waiting_bytes - SLICE_BYTES
        while self._waiting and self.num_waiting_bytes > stop_at:
            self._record_next()

    def catch_up(self) -> None:
        while self._waiting:
            self._record_next()

    def forget_waiting(self) -> None:
        """When the source's state is void anyway; listeners see a gap."""
        self._waiting.clear()
        self.num_waiting_bytes = 0
        self.damaged = False

    def _record_next(self) -> None:
        entry = self._waiting.popleft()
        self.num_waiting_bytes -= len(entry.source)
        self.sequence = entry.sequence
        try:
            batch = decode_batch(entry.source, on_unknown=self._count_unknown)
        except DataLoss:
            # It went out as it was. What it would have changed is not known here.
            self._metrics.malformed.labels("intake").inc()
            self.set_knows_all(False, since=entry.sequence + 1)
            self.damaged = True
            return
        told: list[KvEvent] | None = [] if self._listeners else None
        for event in batch.events:
            if told is not None:
                told += self._telling(event)
            self.record.apply(event)
            if type(event) is AllBlocksCleared and entry.sequence >= self._known_since:
                self._knows_all = True
        if told is not None:
            self._tell(entry, KvEventBatch(batch.ts, tuple(told), batch.data_parallel_rank))

    def _tell(self, entry: _Published, batch: KvEventBatch) -> None:
        outgoing = self._outgoing.batch(with_rank(batch, self._rank))
        for listener in self._listeners:
            listener(entry.sequence, entry.payload, outgoing)

    def _telling(self, event: KvEvent) -> Sequence[KvEvent]:
        """An event as listeners get it, before it is recorded."""
        if type(event) is not BlockStored:
            return [event]
        stores = self._resolved(event) if lacks_tokens(event) else [event]
        return [news for store in stores for news in self._news(store)] if event.report else stores

    def _resolved(self, event: BlockStored) -> list[BlockStored]:
        """Block by block, with what the record has of each: a block that is named again in another tier
        comes without its tokens, and what stands before it in the event need not be its parent."""
        return [self._resolved_block(event, block_hash) for block_hash in event.block_hashes]

    def _resolved_block(self, event: BlockStored, block_hash: ExternalHash) -> BlockStored:
        """As it was told where its content, or its parent, is not known."""
        record, group = self.record, event.group_idx
        content = record.content(block_hash, group)
        parent = content.parent if content is not None else None
        is_orphan = parent is not None and record.content(parent, group) is None
        if content is None or not content.resolved or is_orphan:
            return msgspec.structs.replace(event, block_hashes=(block_hash,), token_ids=(), extra_keys=None)
        return msgspec.structs.replace(
            event,
            block_hashes=(block_hash,),
            parent_block_hash=parent,
            token_ids=content.token_ids,
            block_size=content.block_size,
            lora_id=content.lora_id,
            lora_name=content.lora_name,
            extra_keys=None if content.extra_keys is None else (content.extra_keys,),
        )

    def _news(self, event: BlockStored) -> list[BlockStored]:
        """Of a report, the blocks that nobody told before, as plain stores."""
        size, dense = event.block_size, not lacks_tokens(event)
        news: list[BlockStored] = []
        parent = event.parent_block_hash
        for index, block_hash in enumerate(event.block_hashes):
            if not self.record.copies(block_hash, event.group_idx, event.medium):
                news.append(
                    msgspec.structs.replace(
                        event,
                        block_hashes=(block_hash,),
                        parent_block_hash=parent,
                        token_ids=event.token_ids[index * size : (index + 1) * size] if dense else (),
                        extra_keys=event.extra_keys[index : index + 1] if event.extra_keys else None,
                        lookahead_token_ids=None,
                        report=None,
                    )
                )
            parent = block_hash
        return news

    def _count_unknown(self, type_name: str) -> None:
        self._metrics.unknown_events.inc()
