"""What the store has of a request's blocks, and how much of it makes a prefix that every group can use.

A full group reads every block before the next token. A windowed group reads only those of the window
before it, so only they must be there where a load ends, and only they are loaded.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from reprise_scheduler.kv_cache.config import GroupKind
from reprise_scheduler.kv_cache.group import Group
from reprise_scheduler.sched.load_cost import slowest


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Per group and block the tier that has it; empty = not there, or not asked for. A full group's end at
    the first that is not there."""

    tiers: tuple[tuple[str, ...], ...] = ()


NOTHING_STORED = StoredBlocks()


class LoadRanges:
    """Which blocks of each group a load takes. All groups have blocks of one size."""

    def __init__(self, groups: Sequence[Group], block_size: int) -> None:
        self._groups = groups
        self._block_size = block_size

    def first_read(self, group: Group, end: int) -> int:
        """The first block that tokens after block `end` - 1 read in this group."""
        return group.skipped_tokens(end * self._block_size) // self._block_size

    def end(self, stored: StoredBlocks, *, first: int, limit: int, failed: Collection[int] = ()) -> int:
        """The longest prefix, in blocks and at most `limit`, that can be had when the first `first` blocks
        are valid already; `first` itself when nothing can be added. `failed` blocks are not had."""
        if not stored.tiers:
            return first
        end = min(limit, *map(len, stored.tiers))
        if any(group.kind is GroupKind.FULL for group in self._groups):
            end = min([end, *(index for index in failed if index >= first)])
        while end > first:
            missing = self._last_missing(stored, first, end, failed)
            if missing is None:
                return end
            end = missing
        return first

    def _last_missing(
        self, stored: StoredBlocks, first: int, end: int, failed: Collection[int]
    ) -> int | None:
        """Of the blocks read after `end`, the last one that a windowed group lacks."""
        for group, tiers in zip(self._groups, stored.tiers, strict=True):
            if group.kind is not GroupKind.FULL:
                for index in reversed(range(max(first, self.first_read(group, end)), end)):
                    if not tiers[index] or index in failed:
                        return index
        return None

    def num_blocks(self, first: int, end: int) -> int:
        """Blocks that a load of this prefix fills, over all groups."""
        return sum(end - max(first, self.first_read(group, end)) for group in self._groups)

    def end_within(self, first: int, end: int, max_blocks: int) -> int:
        """As much of the load as fills at most so many blocks."""
        ends = range(first, end + 1)
        return first + bisect_right(ends, max_blocks, key=lambda upto: self.num_blocks(first, upto)) - 1

    def tiers(self, stored: StoredBlocks, first: int, end: int) -> list[str]:
        """Per block of the load the slowest tier that a group loads it from. A block that no group loads,
        because it is before every window, counts as the one after it."""
        firsts = [self.first_read(group, end) for group in self._groups]
        names: list[str] = []
        for index in reversed(range(first, end)):
            read = [
                tiers[index]
                for tiers, first_read in zip(stored.tiers, firsts, strict=True)
                if index >= first_read
            ]
            names.append(slowest(read) if read else names[-1])
        return names[::-1]

    def can_cut(self, end: int, shorter: int) -> bool:
        """Whether the blocks held for a load up to `end` are enough for the shorter prefix, too: a window
        before it reaches no further back."""
        return all(self.first_read(group, shorter) == self.first_read(group, end) for group in self._groups)
