"""A circuit breaker: after failures in a row the far side is left alone for a while, then probed."""

from collections.abc import Callable
from enum import IntEnum


class BreakerState(IntEnum):
    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class CircuitBreaker:
    """closed -(failures in a row)-> open -(cooldown)-> half open -(probe)-> closed, or open again.

    While half open exactly one probe is in flight; nobody else calls. The clock is monotonic seconds.
    """

    def __init__(self, *, failures: int, cooldown_s: float, clock: Callable[[], float]) -> None:
        self._limit = failures
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._num_failures = 0
        self._opened_s = 0.0
        self.state = BreakerState.CLOSED

    @property
    def closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def try_probe(self) -> bool:
        """True for the one caller that may try now; it must report the outcome."""
        if self.state is not BreakerState.OPEN or self._clock() - self._opened_s < self._cooldown_s:
            return False
        self.state = BreakerState.HALF_OPEN
        return True

    def succeeded(self) -> bool:
        """True when this closed the breaker."""
        was_closed = self.closed
        self.state = BreakerState.CLOSED
        self._num_failures = 0
        return not was_closed

    def failed(self) -> bool:
        """True when this opened the breaker."""
        was_closed = self.closed
        self._num_failures += 1
        if was_closed and self._num_failures < self._limit:
            return False
        self.state = BreakerState.OPEN
        self._opened_s = self._clock()
        return was_closed
