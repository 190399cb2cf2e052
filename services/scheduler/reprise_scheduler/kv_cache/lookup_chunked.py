"""The longest hit of chunked local attention: whole chunks are skipped, then blocks up to a miss."""

from collections.abc import Sequence

from reprise_core.ids import BlockHash, BlockId
from reprise_scheduler.kv_cache.config import NULL_BLOCK
from reprise_scheduler.kv_cache.hash_index import HashIndex
from reprise_scheduler.kv_cache.lookup_full import walk


def chunked_hit(
    indexes: Sequence[HashIndex],
    block_hashes: Sequence[BlockHash],
    *,
    max_blocks: int,
    skipped_blocks: int,
) -> list[list[BlockId]]:
    """Per group of the family equally many blocks; `skipped_blocks` cover the whole chunks."""
    rest = block_hashes[skipped_blocks:max_blocks]
    hits = []
    length = max_blocks - skipped_blocks
    for index in indexes:
        hits.append(walk(index, rest, length))
        length = len(hits[-1])
    return [[NULL_BLOCK] * skipped_blocks + hit[:length] for hit in hits]
