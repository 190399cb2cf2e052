"""The guard in front of the external backend: breaker, counters, probing, recovery by itself."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from reprise_runtime.logs import LimitedLog, get_logger
from reprise_store.breaker import BreakerState, CircuitBreaker
from reprise_store.keys import Scope
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import (
    Backend,
    BackendBusy,
    BackendDown,
    BackendPartlyDown,
    Presence,
    Value,
    Values,
)

T = TypeVar("T")


class ExternalTier:
    """A Backend whose calls fail at once while the breaker is not closed.

    Two breakers: `calls` for everything, `writes` for a Redis that answers but has no room.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        calls: CircuitBreaker,
        writes: CircuitBreaker,
        probe: Callable[[], Awaitable[None]],
        on_recovered: Callable[[], Awaitable[None]],
        probe_interval_s: float,
        idle_s: float,
        clock: Callable[[], float],
        metrics: StoreMetrics,
    ) -> None:
        self._backend = backend
        self._calls = calls
        self._writes = writes
        self._probe = probe
        self._on_recovered = on_recovered
        self._probe_interval_s = probe_interval_s
        self._idle_s = idle_s
        self._clock = clock
        self._last_call_s = clock()
        self._metrics = metrics
        self._log = get_logger()
        self._limited = LimitedLog()
        self._answered = False
        self._met = False
        """Whether it ever answered."""
        self.num_failures = 0
        """Times that it was found to be away."""

    @property
    def up(self) -> bool:
        """Whether the last thing known is that it answers."""
        return self._calls.closed and self._answered

    @property
    def writable(self) -> bool:
        """False while a write would be wasted. May admit one probing batch."""
        return self._calls.closed and (self._writes.closed or self._writes.try_probe())

    @property
    def probing_writes(self) -> bool:
        """The next batch shows whether writes are taken again."""
        return self._writes.state is BreakerState.HALF_OPEN

    async def exists(self, scope: Scope, keys: Sequence[str]) -> Presence:
        return await self._guard(lambda: self._backend.exists(scope, keys))

    async def get(self, scope: Scope, keys: Sequence[str]) -> Values:
        return await self._guard(lambda: self._backend.get(scope, keys))

    async def put(self, scope: Scope, items: Sequence[tuple[str, Value]]) -> Sequence[bool | None]:
        """Callers ask `writable` first and always await the answer: it settles the probe."""
        try:
            taken = await self._guard(lambda: self._backend.put(scope, items))
        except (BackendDown, BackendBusy):
            # It says nothing about room, but a probe must be settled.
            if not self._writes.closed:
                self._writes.failed()
            self._show()
            raise
        num_refused = sum(not one for one in taken)
        if num_refused:
            self._limited.warning(self._log, "redis did not take some writes", num_refused=num_refused)
        if True in taken:
            self._writes.succeeded()
        elif False in taken or not self._writes.closed:
            self._writes.failed()
        self._show()
        return taken

    async def ensure_generation(self, scope: Scope, proposal: int) -> int:
        return await self._guard(lambda: self._backend.ensure_generation(scope, proposal))

    async def advance_generation(self, scope: Scope, proposal: int) -> int:
        return await self._guard(lambda: self._backend.advance_generation(scope, proposal))

    async def delete_stale(self, scope: Scope, generation: int) -> int:
        return await self._guard(lambda: self._backend.delete_stale(scope, generation))

    async def probe_forever(self) -> None:
        """The first contact, a probe after each cooldown while the breaker is open, and one now and then
        while nobody calls, so that an outage shows before the next request meets it."""
        while True:
            idle = self._clock() - self._last_call_s > self._idle_s
            if self._calls.try_probe() or (self._calls.closed and (idle or not self._answered)):
                await self._try_probe()
            await asyncio.sleep(self._probe_interval_s)

    async def _try_probe(self) -> None:
        self._last_call_s = self._clock()
        try:
            await self._probe()
        except (BackendDown, BackendBusy) as error:
            self._failed(error)
        else:
            self._succeeded()

    async def _guard(self, call: Callable[[], Awaitable[T]]) -> T:
        if not self._calls.closed:
            raise BackendDown("redis: left alone until it answers a probe")
        self._last_call_s = self._clock()
        try:
            answer = await call()
        except BackendBusy:
            self._metrics.redis_failures.labels("busy").inc()
            raise
        except BackendPartlyDown:
            # Some of its servers answer, so the others' keys must not be given up.
            self._metrics.redis_failures.labels("node").inc()
            raise
        except BackendDown as error:
            self._failed(error)
            raise
        self._succeeded()
        return answer

    def _failed(self, error: Exception) -> None:
        self._metrics.redis_failures.labels("down").inc()
        self._answered = False
        self.num_failures += 1
        if self._calls.failed():
            self._log.warning("redis is away; serving from host memory", error=str(error))
        self._show()

    def _succeeded(self) -> None:
        if self._calls.closed and self._answered:
            self._calls.succeeded()
            return
        was_open, self._answered = self._calls.succeeded(), True
        self._show()
        if was_open or not self._met:
            self._met = True
            self._log.info("redis answers")
            self._recovering = asyncio.ensure_future(self._on_recovered())

    def _show(self) -> None:
        self._metrics.redis_up.set(self.up)
        self._metrics.breaker_state.labels("calls").set(self._calls.state)
        self._metrics.breaker_state.labels("writes").set(self._writes.state)
