"""The free blocks in the order in which they are taken.

Blocks without a hash entry can never be hit, so they are taken first, the latest returned first: a
stack. Blocks with an entry come after them, in the eviction order.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from reprise_core.ids import BlockId


class EvictionOrder(Protocol):
    """Which free block with a hash entry is taken next. Every call's cost must not grow with the pool."""

    def add(self, block_ids: Sequence[BlockId]) -> None:
        """These blocks were returned, in this order; they hold an entry and nobody uses them."""

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        """These blocks, added before, are in use again."""

    def pop(self, num_blocks: int) -> list[BlockId]:
        """The next victims; at most as many as are here."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[BlockId]:
        """In the order of eviction; for tests and snapshots only."""


class LeastRecentlyUsed:
    """A doubly linked list in two arrays of block ids, the null block being both ends.

    Invariants: next[previous[b]] == b for every member, and walking next from the null block meets
    every member once and ends at the null block.
    """

    __slots__ = ("_length", "_next", "_previous")

    def __init__(self, num_blocks: int) -> None:
        self._next: list[BlockId] = [BlockId(0)] * num_blocks
        self._previous: list[BlockId] = [BlockId(0)] * num_blocks
        self._length = 0

    def add(self, block_ids: Sequence[BlockId]) -> None:
        following, previous = self._next, self._previous
        last = previous[0]
        for block_id in block_ids:
            following[last] = block_id
            previous[block_id] = last
            last = block_id
        following[last] = BlockId(0)
        previous[0] = last
        self._length += len(block_ids)

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        following, previous = self._next, self._previous
        for block_id in block_ids:
            after = following[block_id]
            before = previous[block_id]
            following[before] = after
            previous[after] = before
        self._length -= len(block_ids)

    def pop(self, num_blocks: int) -> list[BlockId]:
        assert num_blocks <= self._length
        following = self._next
        taken = []
        block_id = following[0]
        for _ in range(num_blocks):
            taken.append(block_id)
            block_id = following[block_id]
        following[0] = block_id
        self._previous[block_id] = BlockId(0)
        self._length -= num_blocks
        return taken

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[BlockId]:
        block_id = self._next[0]
        while block_id:
            yield block_id
            block_id = self._next[block_id]


class FreeQueue:
    """Every block that nobody holds, exactly once."""

    __slots__ = ("_order", "_unused")

    def __init__(self, num_blocks: int, order: EvictionOrder) -> None:
        # The end of the list is the front of the queue: 1, 2, 3, ... at the start.
        self._unused = [BlockId(i) for i in range(num_blocks - 1, 0, -1)]
        self._order = order

    def __len__(self) -> int:
        return len(self._unused) + len(self._order)

    def __iter__(self) -> Iterator[BlockId]:
        yield from reversed(self._unused)
        yield from self._order

    def take(self, num_blocks: int) -> tuple[list[BlockId], list[BlockId]]:
        """The front of the queue: blocks without an entry, then blocks whose entries must go."""
        unused = self._unused
        num_unused = min(num_blocks, len(unused))
        if num_unused:
            fresh = unused[: -num_unused - 1 : -1]
            del unused[-num_unused:]
        else:
            fresh = []
        return fresh, self._order.pop(num_blocks - num_unused) if num_blocks > num_unused else []

    def put_front(self, block_ids: Sequence[BlockId]) -> None:
        """Blocks without an entry; the first of them is the next to be taken."""
        self._unused += block_ids[::-1]

    def put_back(self, block_ids: Sequence[BlockId]) -> None:
        """Blocks with an entry."""
        self._order.add(block_ids)

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        """Free blocks that were hit; only blocks with an entry can be."""
        self._order.remove(block_ids)
