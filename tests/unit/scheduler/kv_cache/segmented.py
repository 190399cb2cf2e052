"""An eviction policy in thirty lines: blocks that were hit once outlast those that never were."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from reprise_core.ids import BlockHash, BlockId, GroupId
from reprise_scheduler.kv_cache.eviction import EvictionPolicy
from reprise_scheduler.kv_cache.group import Group
from reprise_scheduler.kv_cache.request import CachedRequest


class Segmented(EvictionPolicy):
    """Two least-recently-used lists; the one of blocks that were hit holds half the pool at most."""

    def __init__(self, num_blocks: int) -> None:
        self.max_proven = num_blocks // 2
        self.was_hit: set[BlockId] = set()
        self.fresh: OrderedDict[BlockId, None] = OrderedDict()
        self.proven: OrderedDict[BlockId, None] = OrderedDict()

    def hit(self, request: CachedRequest, group: Group, block_ids: Sequence[BlockId]) -> None:
        self.was_hit.update(block_ids)

    def removed(self, block_id: BlockId, block_hash: BlockHash, group_id: GroupId) -> None:
        self.was_hit.discard(block_id)

    def add(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            (self.proven if block_id in self.was_hit else self.fresh)[block_id] = None
        while len(self.proven) > self.max_proven:
            self.fresh[self.proven.popitem(last=False)[0]] = None

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            (self.fresh if block_id in self.fresh else self.proven).pop(block_id)

    def pop(self, num_blocks: int) -> list[BlockId]:
        return [(self.fresh or self.proven).popitem(last=False)[0] for _ in range(num_blocks)]

    def __len__(self) -> int:
        return len(self.fresh) + len(self.proven)

    def __iter__(self) -> Iterator[BlockId]:
        yield from self.fresh
        yield from self.proven
