"""Who may watch hash entries come and go: eviction policies, miss reasons, verification.

Without observers, which is the default, nothing is called.
"""

from collections.abc import Sequence
from typing import Protocol

from reprise_core.ids import BlockHash, BlockId, GroupId
from reprise_scheduler.kv_cache.group import Group
from reprise_scheduler.kv_cache.request import CachedRequest


class EntryObserver(Protocol):
    """Subclass it and override what matters; the other calls do nothing."""

    def entered(
        self, request: CachedRequest, group: Group, places: Sequence[int], block_ids: Sequence[BlockId]
    ) -> None:
        """These full blocks, at these places of the request's table, got their own entries."""
        return

    def hit(self, request: CachedRequest, group: Group, block_ids: Sequence[BlockId]) -> None:
        """The request adopts these blocks; null ones may be among them."""
        return

    def removed(self, block_id: BlockId, block_hash: BlockHash, group_id: GroupId) -> None:
        """The block lost this entry."""
        return

    def clearing(self, entries: Sequence[tuple[BlockHash, GroupId]]) -> None:
        """Every entry is about to go; `entries` are some of them, at most `MAX_CLEARED`."""
        return


MAX_CLEARED = 65_536
"""Entries that observers are told of at a reset; its cost must not grow with the pool."""
