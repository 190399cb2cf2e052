"""The longest hit of sliding-window attention: the last run of blocks that covers a window."""

from collections.abc import Sequence

from reprise_core.ids import BlockHash, BlockId
from reprise_scheduler.kv_cache.config import NULL_BLOCK
from reprise_scheduler.kv_cache.hash_index import HashIndex


def sliding_hit(
    indexes: Sequence[HashIndex],
    block_hashes: Sequence[BlockHash],
    *,
    max_blocks: int,
    run_blocks: int,
    drops: bool,
    block_size: int,
    alignment: int,
) -> list[list[BlockId]]:
    """Per group of the family equally many blocks, null ones where nothing is read any more.

    Goes from the right, as only the last `run_blocks` blocks of a hit have to be there. The end of a
    run must be a multiple of `alignment` tokens, after one block is given up where `drops` is set.
    """
    hits: list[list[BlockId]] = [[NULL_BLOCK] * max_blocks for _ in indexes]
    length = _find_run(
        indexes,
        block_hashes,
        hits,
        run_blocks=run_blocks,
        drops=drops,
        block_size=block_size,
        alignment=alignment,
    )
    if drops and length:
        length -= 1
        length -= length * block_size % alignment // block_size
    for hit in hits:
        del hit[length:]
    return hits


def _find_run(
    indexes: Sequence[HashIndex],
    block_hashes: Sequence[BlockHash],
    hits: list[list[BlockId]],
    *,
    run_blocks: int,
    drops: bool,
    block_size: int,
    alignment: int,
) -> int:
    """Puts the found blocks into `hits` and returns where the run ends, in blocks; 0 = no run.

    A run that reaches block 0 counts at any length, cut to a multiple of `alignment`.
    """
    run = 0
    for i in range(len(hits[0]) - 1, -1, -1):
        block_hash = block_hashes[i]
        found = [index.first.get(block_hash) for index in indexes]
        if None in found:
            run = 0
            continue
        end_block = i if drops else i + 1
        if not run and end_block * block_size % alignment:
            continue
        for hit, block_id in zip(hits, found, strict=True):
            assert block_id is not None
            hit[i] = block_id
        run += 1
        if run >= run_blocks:
            return i + run
    return run - run * block_size % alignment // block_size
