"""The last batches by sequence, bounded by their number and their bytes."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RingBatch:
    sequence: int
    payload: bytes


class ReplayRing:
    """Invariants: sequences ascend; num_bytes is the sum of the payloads, at most `limit_bytes`;
    at most `limit_batches` batches. The oldest go first."""

    def __init__(self, *, limit_batches: int, limit_bytes: int) -> None:
        self._limit_batches = limit_batches
        self._limit_bytes = limit_bytes
        self._batches: deque[RingBatch] = deque()
        self._num_dropped = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, sequence: int, payload: bytes) -> None:
        assert not self._batches or self._batches[-1].sequence < sequence
        self._batches.append(RingBatch(sequence, payload))
        self.num_bytes += len(payload)
        while len(self._batches) > self._limit_batches or self.num_bytes > self._limit_bytes:
            self.num_bytes -= len(self._batches.popleft().payload)
            self._num_dropped += 1

    @property
    def first_sequence(self) -> int | None:
        return self._batches[0].sequence if self._batches else None

    def position_of(self, sequence: int) -> int:
        """A position that stays good while older batches leave: of the first batch at or after `sequence`."""
        low, high = 0, len(self._batches)
        while low < high:
            middle = (low + high) // 2
            if self._batches[middle].sequence < sequence:
                low = middle + 1
            else:
                high = middle
        return self._num_dropped + low

    def at(self, position: int) -> tuple[int, RingBatch] | None:
        """The batch at a position, or the oldest kept one if that has left, with its own position; None
        past the end."""
        index = max(0, position - self._num_dropped)
        if index >= len(self._batches):
            return None
        return self._num_dropped + index, self._batches[index]
