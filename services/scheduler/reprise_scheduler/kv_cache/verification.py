"""Comparing tokens on a hit, for those who do not want to rely on the hash alone.

With a 32-byte digest a collision is not to be expected in the life of the universe; the check is for
test hashes, for short digests, and for peers that supply hashes.
"""

from collections.abc import Sequence

from reprise_core.ids import BlockHash, BlockId, GroupId
from reprise_scheduler.kv_cache.group import Group
from reprise_scheduler.kv_cache.observer import EntryObserver
from reprise_scheduler.kv_cache.request import CachedRequest

Contents = tuple[tuple[str, str] | None, str, tuple[int, ...]]
"""The adapter's name and path (its number is an engine's own affair), salt, tokens."""


class TokenVerifier(EntryObserver):
    """Keeps the tokens and the namespace of every block that has an own entry.

    Memory: one tuple of `block_size` references per cached block, dropped with the entry.
    """

    def __init__(self) -> None:
        self.num_collisions = 0
        self._contents: dict[BlockId, Contents] = {}

    def entered(
        self, request: CachedRequest, group: Group, places: Sequence[int], block_ids: Sequence[BlockId]
    ) -> None:
        for place, block_id in zip(places, block_ids, strict=True):
            self._contents[block_id] = _contents(request, group, place)

    def removed(self, block_id: BlockId, block_hash: BlockHash, group_id: GroupId) -> None:
        self._contents.pop(block_id, None)

    def clearing(self, entries: Sequence[tuple[BlockHash, GroupId]]) -> None:
        self._contents.clear()

    def first_collision(
        self, request: CachedRequest, group: Group, block_ids: Sequence[BlockId]
    ) -> int | None:
        """The place of the first block of a hit that holds other tokens than the request's."""
        for place, block_id in enumerate(block_ids):
            if block_id and self._contents.get(block_id) != _contents(request, group, place):
                self.num_collisions += 1
                return place
        return None


def _contents(request: CachedRequest, group: Group, place: int) -> Contents:
    start = place * group.block_size
    tokens = tuple(request.token_ids[start : start + group.block_size])
    lora = request.lora
    return (lora.name, lora.path) if lora else None, request.cache_salt or "", tokens
