"""Saves on their way to Redis: a bounded queue whose back-pressure is to drop, never to wait."""

import asyncio
from collections import deque
from dataclasses import dataclass
from time import monotonic

from reprise_store.external_tier import ExternalTier
from reprise_store.keys import Scope
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import BackendBusy, BackendDown, Value
from reprise_store.tier_changes import TierChanges
from reprise_wire.store_codec import StoreTier


@dataclass(frozen=True, slots=True)
class Pending:
    scope: Scope
    generation: int
    key: str
    value: Value


class WriteBehind:
    """Invariants: queued blocks <= `limit_blocks`, queued bytes <= `limit_bytes`.

    At the limit, and while Redis takes no writes, a block is dropped and counted; the host tier has it
    and a later save may bring it again.
    """

    def __init__(
        self,
        tier: ExternalTier,
        *,
        limit_blocks: int,
        limit_bytes: int,
        chunk_bytes: int,
        metrics: StoreMetrics,
        changes: TierChanges | None = None,
    ) -> None:
        """`changes` hears of every block that was written."""
        self._tier = tier
        self._changes = changes
        self._limit_blocks = limit_blocks
        self._limit_bytes = limit_bytes
        self._chunk_bytes = chunk_bytes
        self._metrics = metrics
        self._queue: deque[Pending] = deque()
        self._num_bytes = 0
        self._num_writing = 0
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_dropped = 0
        metrics.save_queue_blocks.set_function(lambda: len(self._queue))
        metrics.save_queue_bytes.set_function(lambda: self._num_bytes)

    def offer(self, pending: Pending) -> bool:
        """Never waits. False: dropped and counted."""
        nbytes = len(pending.value)
        if len(self._queue) >= self._limit_blocks or self._num_bytes + nbytes > self._limit_bytes:
            self._drop("queue_full", 1)
            return False
        self._queue.append(pending)
        self._num_bytes += nbytes
        self._idle.clear()
        self._arrived.set()
        return True

    def forget(self, scope: Scope, generation: int) -> None:
        """Drops what waits for another generation of the scope: nobody could read it."""
        kept = [item for item in self._queue if item.scope != scope or item.generation == generation]
        num_stale = len(self._queue) - len(kept)
        if num_stale:
            self._queue = deque(kept)
            self._num_bytes = sum(len(item.value) for item in kept)
            self._drop("stale", num_stale)

    async def write_forever(self) -> None:
        """One writer; several may run beside each other."""
        while True:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            batch = self._take_batch()
            self._num_writing += 1
            try:
                await self._write(batch)
            finally:
                self._num_writing -= 1
                if not self._queue and not self._num_writing:
                    self._idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Waits until all is written or the time is up; what is left is counted as dropped."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            self._drop("unavailable", len(self._queue))

    def _take_batch(self) -> list[Pending]:
        """Blocks of one scope, at least one and about one chunk of bytes."""
        batch = [self._queue.popleft()]
        nbytes = len(batch[0].value)
        while self._queue and self._queue[0].scope == batch[0].scope:
            if nbytes + len(self._queue[0].value) > self._chunk_bytes:
                break
            batch.append(self._queue.popleft())
            nbytes += len(batch[-1].value)
        self._num_bytes -= nbytes
        return batch

    async def _write(self, batch: list[Pending]) -> None:
        if not self._tier.writable:
            self._drop("unavailable", len(batch))
            return
        started_s = monotonic()
        try:
            taken = await self._tier.put(batch[0].scope, [(item.key, item.value) for item in batch])
        except (BackendDown, BackendBusy):
            self._drop("unavailable", len(batch))
            return
        self._metrics.save_seconds.observe(monotonic() - started_s)
        written = [item for item, was_taken in zip(batch, taken, strict=True) if was_taken]
        if self._changes is not None:
            for item in written:
                self._changes.stored(StoreTier.EXTERNAL, item.key)
        self._metrics.saves.labels("external", "written").inc(len(written))
        self._metrics.save_bytes.labels("external").inc(sum(len(item.value) for item in written))
        if len(written) < len(batch):
            self._drop("no_room", sum(one is False for one in taken))
            self._drop("unavailable", sum(one is None for one in taken))

    def _drop(self, reason: str, num_blocks: int) -> None:
        self.num_dropped += num_blocks
        self._metrics.saves_dropped.labels(reason).inc(num_blocks)
        self._metrics.saves.labels("external", "dropped").inc(num_blocks)
