"""Follows the store's tiers in the background and sends their events between those of the steps."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain

from reprise_core.errors import RepriseError
from reprise_core.kv_events import BlockStored, KvEvent
from reprise_runtime.logs import LimitedLog, get_logger
from reprise_scheduler.metrics import TierMetrics
from reprise_scheduler.ports import ExternalBlocks, RecordedEvents
from reprise_scheduler.tier_events import TierEvents
from reprise_wire.store_codec import TierUpdate

SLICE_BLOCKS = 64
"""Blocks whose events are made without giving way to a step: some hundred microseconds."""
FIRST_RETRY_S = 0.2
MAX_RETRY_S = 2.0


class TierWatch:
    """All on one event loop. While `watch` is broken nothing is announced of any tier."""

    def __init__(
        self, external: ExternalBlocks, sink: RecordedEvents, metrics: TierMetrics, *, integer_hashes: bool
    ) -> None:
        self._external = external
        self._sink = sink
        self._metrics = metrics
        self._events = TierEvents(sink.record, integer_hashes=integer_hashes)
        self._followed: tuple[str, tuple[str, ...]] | None = None
        self._task: asyncio.Task[None] | None = None
        self._again: Iterator[BlockStored] | None = None
        """Told again after everything was cleared; changes wait for its end."""
        self._told = asyncio.Event()
        self._told.set()
        self._telling: asyncio.Task[None] | None = None
        self._log = get_logger()
        self._limited = LimitedLog()

    def follow(self, fingerprint: str, adapters: tuple[str, ...] = ()) -> None:
        """Begins to watch, or watches another model's blocks from now on, and those of adapters with these
        content digests."""
        if (fingerprint, adapters) == self._followed:
            return
        self._followed = (fingerprint, adapters)
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._watch_forever(fingerprint, adapters, self._task))

    def send(self, events: Sequence[KvEvent]) -> None:
        """The engine's own events, and what they make known of tiers."""
        again = self._events.before(events)
        self._sink.send(events)
        self._send(self._events.after(events))
        if again is not None:
            # What was not told again yet since the time before is still to be told.
            self._again = chain(again, self._again or ())
            self._told.clear()
            if self._telling is None or self._telling.done():
                self._telling = asyncio.create_task(self._tell_again())

    def show(self) -> None:
        self._metrics.show(self._events.counters)

    async def stop(self) -> None:
        tasks = [task for task in (self._task, self._telling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell_again(self) -> None:
        while (again := self._again) is not None:
            event = next(again, None)
            if event is None:
                self._again = None
            else:
                self._send([event])
            await asyncio.sleep(0)
        self._told.set()

    async def _watch_forever(
        self, fingerprint: str, adapters: tuple[str, ...], former: asyncio.Task[None] | None
    ) -> None:
        if former is not None:
            await asyncio.gather(former, return_exceptions=True)
            await self._lose()
        retry_s = FIRST_RETRY_S
        while True:
            try:
                async for update in self._external.watch_tiers(fingerprint, adapters):
                    await self._take(update)
                    retry_s = FIRST_RETRY_S
            except RepriseError as error:
                self._limited.warning(self._log, "not watching the store's tiers", error=str(error))
            self._metrics.watching.set(0)
            self._metrics.breaks.inc()
            await self._lose()
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, MAX_RETRY_S)

    async def _take(self, update: TierUpdate) -> None:
        if update.start:
            self._metrics.watching.set(1)
            await self._lose()
        for start in range(0, len(update.changes), SLICE_BLOCKS):
            await self._told.wait()
            self._send(self._events.change(update.changes[start : start + SLICE_BLOCKS]))
            await asyncio.sleep(0)

    async def _lose(self) -> None:
        await self._told.wait()
        for events in self._events.lose():
            self._send(events)
            await asyncio.sleep(0)
            await self._told.wait()

    def _send(self, events: Sequence[KvEvent]) -> None:
        if events:
            self._sink.send(events)
