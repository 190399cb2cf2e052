"""The last batches by sequence, bounded by their number and their bytes."""

from bisect import bisect_right
from collections import deque
from typing import NamedTuple


class RingBatch(NamedTuple):
    sequence: int
    """Of the first one, for heartbeats in a row."""
    payload: bytes
    """Of the last one."""
    num_batches: int = 1
    is_heartbeat: bool = False

    @property
    def end(self) -> int:
        """The number after it."""
        return self.sequence + self.num_batches


class ReplayRing:
    """Heartbeats in a row are one entry, so that silence pushes nothing out; a replay tells each of them,
    with the time of the last.

    Invariants: sequences ascend; num_bytes is the sum of the payloads, at most `limit_bytes`;
    at most `limit_batches` entries. The oldest go first.
    """

    def __init__(self, *, limit_batches: int, limit_bytes: int) -> None:
        self._limit_batches = limit_batches
        self._limit_bytes = limit_bytes
        self._batches: deque[RingBatch] = deque()
        self._num_dropped = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, sequence: int, payload: bytes, *, is_heartbeat: bool = False) -> None:
        batches = self._batches
        last = batches[-1] if batches else None
        assert last is None or last.end <= sequence
        first, num_batches = sequence, 1
        if is_heartbeat and last is not None and last.is_heartbeat and last.end == sequence:
            first, num_batches = last.sequence, last.num_batches + 1
            self.num_bytes -= len(batches.pop().payload)
        batches.append(RingBatch(first, payload, num_batches, is_heartbeat))
        self.num_bytes += len(payload)
        while len(batches) > self._limit_batches or self.num_bytes > self._limit_bytes:
            self.num_bytes -= len(batches.popleft().payload)
            self._num_dropped += 1

    @property
    def first_sequence(self) -> int | None:
        return self._batches[0].sequence if self._batches else None

    @property
    def end_sequence(self) -> int:
        """The number after the last one that was appended and kept; 0 without any."""
        return self._batches[-1].end if self._batches else 0

    def position_of(self, sequence: int) -> int:
        """A position that stays good while older batches leave: of the entry that has `sequence`, or the
        first one after it."""
        low, high = 0, len(self._batches)
        while low < high:
            middle = (low + high) // 2
            if self._batches[middle].end <= sequence:
                low = middle + 1
            else:
                high = middle
        return self._num_dropped + low

    def at(self, position: int) -> tuple[int, RingBatch] | None:
        """The entry at a position, or the oldest kept one if that has left, with its own position; None
        past the end."""
        index = max(0, position - self._num_dropped)
        if index >= len(self._batches):
            return None
        return self._num_dropped + index, self._batches[index]

    def after(self, sequence: int) -> list[tuple[int, bytes]]:
        """What is kept of the batches after `sequence`. May be called from any thread."""
        batches = list(self._batches)
        first = bisect_right(batches, sequence + 1, key=lambda batch: batch.end)
        return [
            (number, batch.payload)
            for batch in batches[first:]
            for number in range(max(batch.sequence, sequence + 1), batch.end)
        ]
