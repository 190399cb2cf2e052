"""The longest hit of full attention: every block from the first on, up to the first miss."""

from collections.abc import Sequence
from itertools import islice

from reprise_core.ids import BlockHash, BlockId
from reprise_scheduler.kv_cache.hash_index import HashIndex


def walk(index: HashIndex, block_hashes: Sequence[BlockHash], max_blocks: int) -> list[BlockId]:
    """Blocks of the leading hashes that the group has."""
    found = map(index.first.get, islice(block_hashes, max_blocks))
    # Calls next() until it gives None or the hashes end: one pass inside C code.
    return list(iter(found.__next__, None))


def full_hit(
    indexes: Sequence[HashIndex],
    block_hashes: Sequence[BlockHash],
    *,
    max_blocks: int,
    drops: bool,
    block_size: int,
    alignment: int,
) -> list[list[BlockId]]:
    """Per group of the family equally many blocks: those that all of them have.

    With `drops`, the last matched block is given up; what is left is cut to a multiple of
    `alignment` tokens.
    """
    hits = []
    length = max_blocks
    for index in indexes:
        hits.append(walk(index, block_hashes, length))
        length = len(hits[-1])
    if drops and length:
        length -= 1
    length -= length * block_size % alignment // block_size
    for hit in hits:
        del hit[length:]
    return hits
