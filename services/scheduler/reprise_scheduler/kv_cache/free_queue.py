"""The free blocks in the order in which they are taken.

Blocks without a hash entry can never be hit, so they are taken first, the latest returned first: a
stack. Blocks with an entry come after them, in the eviction order.
"""

from collections.abc import Iterator, Sequence

from reprise_core.ids import BlockId
from reprise_scheduler.kv_cache.eviction import EvictionPolicy


class FreeQueue:
    """Every block that nobody holds, exactly once."""

    __slots__ = ("_order", "_unused")

    def __init__(self, num_blocks: int, order: EvictionPolicy) -> None:
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
