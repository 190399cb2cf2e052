"""What a full waiting queue tells those that it turns away: why, and when to come again."""

from collections import deque
from enum import StrEnum

from reprise_core.errors import Exhausted

WINDOW_S = 30.0
MIN_MEASURED_S = 1.0
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
DEFAULT_RETRY_S = 5.0
"""While the present backlog is younger than MIN_MEASURED_S."""
_BUCKET_S = 0.1


class QueueLimit(StrEnum):
    """Names of the limits, as the reference labels its rejections."""

    REQUESTS = "max_num_queued_reqs"
    TOKENS = "max_num_queued_tokens"


class QueueFull(Exhausted):
    def __init__(self, limit: QueueLimit, problem: str, *, retry_after_s: float) -> None:
        super().__init__(f"{problem}; try again in {retry_after_s:.0f} s")
        self.limit = limit
        self.retry_after_s = retry_after_s


class DrainRate:
    """Requests that leave the waiting queue for their first step, per second of backlog.

    Only the time with a backlog counts: an engine that was idle was not slow. Holds at most
    WINDOW_S / 0.1 s counts.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._left: deque[tuple[float, int]] = deque()

    def backlog_began(self, now_s: float) -> None:
        """The queue was empty until now."""
        self._began_s = now_s
        self._left.clear()

    def left(self, now_s: float) -> None:
        """One request was admitted."""
        if self._left and now_s - self._left[-1][0] < _BUCKET_S:
            begun_s, count = self._left[-1]
            self._left[-1] = (begun_s, count + 1)
        else:
            self._left.append((now_s, 1))
        self._forget(now_s)

    def per_second(self, now_s: float) -> float | None:
        """None while too little was measured."""
        if self._began_s is None or now_s - self._began_s < MIN_MEASURED_S:
            return None
        self._forget(now_s)
        return sum(count for _, count in self._left) / min(now_s - self._began_s, WINDOW_S)

    def retry_after_s(self, num_waiting: int, now_s: float) -> float:
        """When all that wait now will have been admitted, at the measured rate, within bounds."""
        rate = self.per_second(now_s)
        if rate is None:
            return DEFAULT_RETRY_S
        if rate == 0:
            return MAX_RETRY_S
        return min(max(num_waiting / rate, MIN_RETRY_S), MAX_RETRY_S)

    def _forget(self, now_s: float) -> None:
        while self._left and self._left[0][0] <= now_s - WINDOW_S:
            self._left.popleft()
