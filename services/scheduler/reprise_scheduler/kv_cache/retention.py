"""Which blocks of a sliding-window group are worth a hash entry.

A hit needs only the blocks of one window before its end, and ends are multiples of the scheduler
block size. So blocks that are in no window of an end that matters need no entry: with an interval,
ends that matter are its multiples, the prompt's end, and the junction where prefixes part.
"""

from collections.abc import Sequence

from reprise_scheduler.kv_cache.group import Group


class WindowRetention:
    """The mask of one sliding group. `shift` is 1 where the last matched block will be dropped."""

    __slots__ = ("_any_drops", "_block_size", "_interval", "_run", "_segment_blocks", "_shift", "_unit")

    def __init__(
        self, group: Group, *, interval: int | None, scheduler_block_size: int, any_drops: bool
    ) -> None:
        segment_tokens = scheduler_block_size if interval is None else interval
        self._block_size = group.block_size
        self._run = group.run_blocks
        self._shift = int(group.drops)
        self._segment_blocks = segment_tokens // group.block_size
        self._interval = interval
        self._unit = scheduler_block_size
        self._any_drops = any_drops

    def keeps(
        self, first: int, end: int, *, num_prompt_tokens: int, junction_tokens: int
    ) -> Sequence[bool] | None:
        """For blocks first to end - 1, whether each is kept; None if all are."""
        segment, run, shift = self._segment_blocks, self._run, self._shift
        if segment and run >= segment:
            return None
        if segment:
            kept = [i >= shift and (i - shift) % segment >= segment - run for i in range(first, end)]
        else:
            kept = [False] * (end - first)
        if self._interval is not None:
            for boundary in self._boundaries(num_prompt_tokens, junction_tokens):
                window_end = boundary // self._block_size + shift
                for i in range(max(first, window_end - run), min(end, window_end)):
                    kept[i - first] = True
        return kept

    def _boundaries(self, num_prompt_tokens: int, junction_tokens: int) -> list[int]:
        unit = self._unit
        last = (num_prompt_tokens - 1) // unit * unit
        if self._any_drops:
            boundaries = [max(last - unit, 0), max(num_prompt_tokens // unit * unit - unit, 0)]
        else:
            boundaries = [last]
        if junction_tokens > 0:
            boundaries.append(junction_tokens // unit * unit)
        return boundaries
