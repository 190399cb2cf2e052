"""Saves on their way to Redis: a bounded queue whose back-pressure is to drop, never to wait."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic

from reprise_store.external_tier import ExternalTier
from reprise_store.generations import MAX_SCOPES
from reprise_store.keys import Scope
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import BackendBusy, BackendDown, BackendPartlyDown, Value
from reprise_store.tier_changes import TierChanges
from reprise_wire.store_codec import StoreTier

MAX_DOUBLINGS = 4
"""Of the pause before another try, and halvings of what is tried at once."""

SettleGeneration = Callable[[Scope], Awaitable[None]]
"""Asks Redis for the scope's generation and has `forget` called where it is another one. Raises BackendDown
or BackendBusy."""


@dataclass(frozen=True, slots=True)
class Pending:
    scope: Scope
    generation: int
    key: str
    value: Value


@dataclass(order=True, slots=True)
class _Entry:
    due_s: float
    """When it may be written: at once, or some time after a failed try."""
    number: int
    queued_s: float
    pending: Pending = field(compare=False)
    num_tries: int = 0

    @property
    def alike(self) -> tuple[Scope, int, int]:
        """What entries of one batch have in common."""
        return self.pending.scope, self.pending.generation, self.num_tries


@dataclass(eq=False, slots=True)
class _Batch:
    entries: list[_Entry]
    stale: bool = False
    """Its generation ended while it was being written."""


class WriteBehind:
    """Invariants: blocks held <= `limit_blocks`, their bytes <= `limit_bytes`. Held is what waits and what is
    being written.

    At the limit the newest block is dropped and counted: those that wait are the front of their prompts,
    without which nobody finds the later ones. While Redis takes no writes they wait, and so does a block
    whose write failed with the connection; one older than `max_age_s` is dropped. Blocks of a cluster's node
    that is away get no more than half of the bytes, so that they do not crowd out the others'. A block that
    Redis itself refuses is not tried again. The host tier may have what was dropped, and a later save may
    bring it again.
    """

    def __init__(
        self,
        tier: ExternalTier,
        *,
        limit_blocks: int,
        limit_bytes: int,
        max_age_s: float,
        pause_s: float,
        chunk_bytes: int,
        metrics: StoreMetrics,
        changes: TierChanges | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`pause_s` is waited before a second try, doubled for each one after it, and bounds how late it is
        noticed that Redis takes writes again. `changes` hears of every block that was written."""
        self._tier = tier
        self._changes = changes
        self._limit_blocks = limit_blocks
        self._limit_bytes = limit_bytes
        self._max_age_s = max_age_s
        self._pause_s = pause_s
        self._chunk_bytes = chunk_bytes
        self._metrics = metrics
        self._clock = clock
        self._waiting: list[_Entry] = []
        """A heap."""
        self._writing: list[_Batch] = []
        self._numbers = count()
        self._num_blocks = 0
        self._num_bytes = 0
        self._num_retry_bytes = 0
        self._next_expiry_s = 0.0
        self._settled: set[Scope] = set()
        """Scopes whose generation was asked for since the last failure."""
        self._num_failures_seen = -1
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_dropped = 0
        metrics.save_queue_blocks.set_function(lambda: self._num_blocks)
        metrics.save_queue_bytes.set_function(lambda: self._num_bytes)

    def offer(self, pending: Pending) -> bool:
        """Never waits. False: dropped and counted."""
        nbytes = len(pending.value)
        if self._num_blocks >= self._limit_blocks or self._num_bytes + nbytes > self._limit_bytes:
            self._count_dropped("queue_full", 1)
            return False
        now_s = self._clock()
        heappush(self._waiting, _Entry(now_s, next(self._numbers), now_s, pending))
        self._num_blocks += 1
        self._num_bytes += nbytes
        self._idle.clear()
        self._arrived.set()
        return True

    def forget(self, scope: Scope, generation: int) -> None:
        """Drops what waits for another generation of the scope: nobody could read it."""

        def is_stale(pending: Pending) -> bool:
            return pending.scope == scope and pending.generation != generation

        self._drop_where(lambda entry: is_stale(entry.pending), "stale")
        for batch in self._writing:
            batch.stale = batch.stale or is_stale(batch.entries[0].pending)

    async def write_forever(self, settle: SettleGeneration) -> None:
        """One writer; several may run beside each other."""
        while True:
            batch = await self._next_batch(settle)
            self._writing.append(batch)
            try:
                await self._write(batch)
            finally:
                self._writing.remove(batch)

    async def drain(self, timeout_s: float) -> None:
        """Waits until all is written or the time is up; what is left is counted as dropped."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            self._drop_where(lambda entry: True, "unavailable")

    def check_invariants(self) -> None:
        being_written = [entry for batch in self._writing for entry in batch.entries]
        held = [*self._waiting, *being_written]
        assert (len(held), _num_bytes(held)) == (self._num_blocks, self._num_bytes)
        assert self._num_blocks <= self._limit_blocks
        assert self._num_bytes <= self._limit_bytes
        retried = [entry for entry in self._waiting if entry.num_tries]
        assert _num_bytes(retried) == self._num_retry_bytes
        assert self._idle.is_set() == (not held)

    async def _next_batch(self, settle: SettleGeneration) -> _Batch:
        """Waits until something is due and Redis takes writes; drops what gets too old meanwhile."""
        while True:
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            now_s = self._clock()
            head = self._waiting[0]
            if self._is_expired(head, now_s):
                self._drop([self._pop()], "expired")
            elif head.due_s > now_s:
                self._drop_expired(now_s)
                self._arrived.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._arrived.wait(), min(head.due_s - now_s, self._pause_s))
            elif not await self._generation_is_settled(head.pending.scope, settle):
                self._drop_expired(now_s)
                await asyncio.sleep(self._pause_s)
            elif self._waiting and self._waiting[0] is head:  # not if that took a while
                if self._tier.writable:
                    return self._take_batch(now_s)
                self._drop_expired(now_s)
                await asyncio.sleep(self._pause_s)

    async def _generation_is_settled(self, scope: Scope, settle: SettleGeneration) -> bool:
        """After a failure a server may be back that lost the generation, or another store may have reset it:
        then what waits is dropped before it is written, not found to be useless after."""
        if self._tier.num_failures != self._num_failures_seen or len(self._settled) >= MAX_SCOPES:
            self._settled.clear()
            self._num_failures_seen = self._tier.num_failures
        if scope in self._settled:
            return True
        try:
            await settle(scope)
        except BackendPartlyDown:
            pass  # the last known one holds while its server is away
        except (BackendDown, BackendBusy):
            return False
        self._settled.add(scope)
        return True

    def _take_batch(self, now_s: float) -> _Batch:
        """Blocks of one scope that are due, at least one and about one chunk of bytes; just one if it is to
        show whether writes are taken again."""
        entries = [self._pop()]
        first = entries[0]
        left = (self._chunk_bytes >> first.num_tries) - len(first.pending.value)
        while self._waiting and not self._tier.probing_writes:
            head = self._waiting[0]
            left -= len(head.pending.value)
            if head.due_s > now_s or head.alike != first.alike or left < 0:
                break
            entries.append(self._pop())
        return _Batch(entries)

    def _pop(self) -> _Entry:
        entry = heappop(self._waiting)
        if entry.num_tries:
            self._num_retry_bytes -= len(entry.pending.value)
        return entry

    async def _write(self, batch: _Batch) -> None:
        items = [entry.pending for entry in batch.entries]
        started_s = self._clock()
        try:
            taken = await self._tier.put(items[0].scope, [(item.key, item.value) for item in items])
        except BackendPartlyDown:
            self._try_again(batch, batch.entries, limit_bytes=self._limit_bytes // 2)
            return
        except (BackendDown, BackendBusy):
            self._try_again(batch, batch.entries, limit_bytes=self._limit_bytes)
            return
        except asyncio.CancelledError:
            self._release(batch.entries)
            raise
        self._metrics.save_seconds.observe(self._clock() - started_s)
        by_answer: dict[bool | None, list[_Entry]] = {True: [], False: [], None: []}
        for entry, was_taken in zip(batch.entries, taken, strict=True):
            by_answer[was_taken].append(entry)
        self._written(by_answer[True])
        self._drop(by_answer[False], "no_room")
        self._try_again(batch, by_answer[None], limit_bytes=self._limit_bytes // 2)

    def _written(self, entries: Sequence[_Entry]) -> None:
        self._metrics.saves.labels("external", "written").inc(len(entries))
        self._metrics.save_bytes.labels("external").inc(_num_bytes(entries))
        if self._changes is not None:
            for entry in entries:
                self._changes.stored(StoreTier.EXTERNAL, entry.pending.key)
        self._release(entries)

    def _try_again(self, batch: _Batch, entries: Sequence[_Entry], *, limit_bytes: int) -> None:
        """Later, so that in a cluster others' blocks pass those of a node that is away.
        `limit_bytes`: of all that waits for another try."""
        if batch.stale:
            self._drop(entries, "stale")
            return
        now_s, num_retried = self._clock(), 0
        for entry in entries:
            nbytes = len(entry.pending.value)
            if self._num_retry_bytes + nbytes > limit_bytes:
                self._drop([entry], "unavailable")
                continue
            entry.due_s = now_s + self._pause_s * 2**entry.num_tries
            entry.num_tries = min(entry.num_tries + 1, MAX_DOUBLINGS)
            heappush(self._waiting, entry)
            self._num_retry_bytes += nbytes
            num_retried += 1
        self._metrics.save_retries.inc(num_retried)

    def _is_expired(self, entry: _Entry, now_s: float) -> bool:
        return entry.queued_s + self._max_age_s < now_s

    def _drop_expired(self, now_s: float) -> None:
        """Also those behind the first one; now and then, for it looks at all."""
        if now_s >= self._next_expiry_s:
            self._next_expiry_s = now_s + self._pause_s
            self._drop_where(lambda entry: self._is_expired(entry, now_s), "expired")

    def _drop_where(self, condition: Callable[[_Entry], bool], reason: str) -> None:
        """Of those that wait."""
        dropped = [entry for entry in self._waiting if condition(entry)]
        if dropped:
            self._waiting = [entry for entry in self._waiting if not condition(entry)]
            heapify(self._waiting)
            self._num_retry_bytes -= _num_bytes([entry for entry in dropped if entry.num_tries])
            self._drop(dropped, reason)

    def _drop(self, entries: Sequence[_Entry], reason: str) -> None:
        if entries:
            self._count_dropped(reason, len(entries))
            self._release(entries)

    def _release(self, entries: Sequence[_Entry]) -> None:
        self._num_blocks -= len(entries)
        self._num_bytes -= _num_bytes(entries)
        if not self._num_blocks:
            self._idle.set()

    def _count_dropped(self, reason: str, num_blocks: int) -> None:
        self.num_dropped += num_blocks
        self._metrics.saves_dropped.labels(reason).inc(num_blocks)
        self._metrics.saves.labels("external", "dropped").inc(num_blocks)


def _num_bytes(entries: Sequence[_Entry]) -> int:
    return sum(len(entry.pending.value) for entry in entries)
