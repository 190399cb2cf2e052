"""Whether a source has been silent for too long."""

from reprise_wire.event_source_values import SourceOptions


class Silence:
    """Times are monotonic seconds. Without a limit (`silence_s` 0) no source is ever silent."""

    def __init__(self, options: SourceOptions) -> None:
        self._limit_s = options.silence_s
        self._drop_s = options.silence_s + options.drop_after_s
        self._heard_s: float | None = None
        self._is_silent = False

    @property
    def is_off(self) -> bool:
        """Nothing has come yet, or nothing for too long."""
        return self._is_silent or self._heard_s is None

    def heard(self, *, now_s: float) -> None:
        self._heard_s = now_s
        self._is_silent = False

    def wake_s(self, *, has_blocks: bool) -> float | None:
        """When the limit is passed, and after that, when blocks are to be dropped."""
        if not self._limit_s or self._heard_s is None:
            return None
        if not self._is_silent:
            return self._heard_s + self._limit_s
        return self._heard_s + self._drop_s if has_blocks else None

    def begins(self, *, now_s: float) -> bool:
        """True once when the limit is passed."""
        if self.is_off or not self._limit_s or now_s < (self._heard_s or 0.0) + self._limit_s:
            return False
        self._is_silent = True
        return True

    def drops(self, *, now_s: float) -> bool:
        """Whether it has lasted so long that what is known of the source goes."""
        return self._is_silent and now_s >= (self._heard_s or 0.0) + self._drop_s
