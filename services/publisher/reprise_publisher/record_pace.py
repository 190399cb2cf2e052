"""When published batches are recorded: a burst goes out first, and the record still keeps up."""

QUIET_S = 0.02
"""Silence after which nothing else is to be done: recording takes all the time."""
SHARE, LATE_SHARE = 0.1, 0.5
"""Of the time while batches come, before and after the record lags by LATE_S."""
LATE_S = 1.0


class RecordPace:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._quiet_from_s = 0.0
        self._rest_until_s = 0.0

    def batches_came(self, *, now_s: float) -> None:
        self._quiet_from_s = now_s + QUIET_S

    def recorded(self, *, started_s: float, ended_s: float, lag_s: float) -> None:
        share = LATE_SHARE if lag_s > LATE_S else SHARE
        self._rest_until_s = ended_s + (ended_s - started_s) * (1 / share - 1)

    def wait_s(self, *, now_s: float) -> float:
        """Until the next slice is due; 0 = now."""
        return max(0.0, min(self._rest_until_s, self._quiet_from_s) - now_s)
