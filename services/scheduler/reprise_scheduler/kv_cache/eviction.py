"""Which cached blocks are kept: the eviction order, and what gets an entry at all."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from reprise_core.ids import BlockId
from reprise_scheduler.kv_cache.group import Group
from reprise_scheduler.kv_cache.observer import EntryObserver
from reprise_scheduler.kv_cache.request import CachedRequest


class EvictionPolicy(EntryObserver, Protocol):
    """Made with the number of blocks in the pool. No call's cost may grow with the pool.

    The members are the free blocks that were returned with an entry. A member may lose its entry
    (`removed`) and still stays a member until it is popped.
    """

    observes: bool = True
    """False saves the calls of `EntryObserver` and of `keeps`."""

    def add(self, block_ids: Sequence[BlockId]) -> None:
        """These blocks were returned, in this order; they hold an entry and nobody uses them."""

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        """These members are in use again."""

    def pop(self, num_blocks: int) -> list[BlockId]:
        """The next victims, members no more; at most as many as are here."""
        ...

    def keeps(self, request: CachedRequest, group: Group, first: int, end: int) -> Sequence[bool] | None:
        """For blocks first to end - 1 of the request, whether each gets an entry; None = all.

        A window group's own retention still applies.
        """
        return None

    def __len__(self) -> int:
        """How many members there are."""
        ...

    def __iter__(self) -> Iterator[BlockId]:
        """In the order of eviction as it is now; for tests and snapshots only."""
        ...


class LeastRecentlyUsed(EvictionPolicy):
    """A doubly linked list in two arrays of block ids, the null block being both ends.

    Invariants: next[previous[b]] == b for every member, and walking next from the null block meets
    every member once and ends at the null block.
    """

    __slots__ = ("_length", "_next", "_previous")

    observes = False

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
