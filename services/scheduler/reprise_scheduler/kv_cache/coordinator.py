"""The longest prefix that is valid in every group.

Groups that are equal in all but the draft flag form a *family*: they are looked up together, and if
one drops its last matched block, all do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reprise_core.ids import BlockHash, BlockId
from reprise_scheduler.kv_cache.config import GroupKind
from reprise_scheduler.kv_cache.group import Group, ceil_div
from reprise_scheduler.kv_cache.hash_index import HashIndex
from reprise_scheduler.kv_cache.lookup_chunked import chunked_hit
from reprise_scheduler.kv_cache.lookup_full import full_hit
from reprise_scheduler.kv_cache.lookup_sliding import sliding_hit
from reprise_scheduler.kv_cache.request import PrefixHit


@dataclass(slots=True)
class Family:
    """Groups that are looked up together; `group` stands for all of them."""

    group: Group
    group_ids: list[int]
    indexes: list[HashIndex]
    drops: bool


def make_families(groups: Sequence[Group], indexes: Sequence[HashIndex]) -> list[Family]:
    """In the order of their first groups, but full attention first."""
    families: dict[object, Family] = {}
    for group in groups:
        family = families.setdefault(replace(group.spec, eagle=False), Family(group, [], [], False))
        family.group_ids.append(group.id)
        family.indexes.append(indexes[group.id])
        family.drops |= group.drops
    return sorted(families.values(), key=lambda family: family.group.kind is not GroupKind.FULL)


class Coordinator:
    """Finds hits; changes nothing."""

    def __init__(
        self,
        groups: Sequence[Group],
        indexes: Sequence[HashIndex],
        *,
        hash_block_size: int,
        scheduler_block_size: int,
    ) -> None:
        self._num_groups = len(groups)
        self._families = make_families(groups, indexes)
        self._hash_block_size = hash_block_size
        self.alignment = scheduler_block_size if len(groups) > 1 else groups[0].block_size

    def longest_hit(self, block_hashes: Sequence[BlockHash], limit_tokens: int) -> PrefixHit:
        """The longest prefix of at most `limit_tokens` tokens.

        One family can shorten what another has found, so the search goes round until a round changes
        nothing. A dropping family looks one block further, gives the last one up, and is then marked:
        looking again at the shorter length must not drop once more, unless somebody else has
        shortened it.
        """
        views = self._views(block_hashes)
        hits: list[list[BlockId]] = [[] for _ in range(self._num_groups)]
        hashed_tokens = len(block_hashes) * self._hash_block_size
        dropped: set[int] = set()
        longest = 0
        length = limit_tokens
        first_round = True
        while True:
            round_limit = length
            for number, family in enumerate(self._families):
                if family.group.kind is GroupKind.FULL and not first_round:
                    continue
                view = views[family.group.hashes_per_block]
                if family.drops and number not in dropped:
                    further = (
                        min(length + family.group.block_size, hashed_tokens) if len(hits) > 1 else length
                    )
                    found = self._search(family, view, hits, further, drops=True)
                    dropped.add(number)
                else:
                    found = self._search(family, view, hits, length, drops=False)
                    if found < length:
                        dropped.clear()
                length = found
                longest = max(longest, length)
            if length >= round_limit or len(hits) == 1:
                break
            first_round = False
        self._cut_full(hits, length)
        return PrefixHit(
            blocks=tuple(map(tuple, hits)),
            num_tokens=length,
            junction=longest if longest > length and len(hits) > 1 else 0,
        )

    def _views(self, block_hashes: Sequence[BlockHash]) -> dict[int, Sequence[BlockHash]]:
        """The hashes as each block size sees them: a block has the hash of the last one inside it."""
        ratios = {family.group.hashes_per_block for family in self._families}
        return {n: block_hashes if n == 1 else block_hashes[n - 1 :: n] for n in ratios}

    def _search(
        self,
        family: Family,
        view: Sequence[BlockHash],
        hits: list[list[BlockId]],
        limit_tokens: int,
        *,
        drops: bool,
    ) -> int:
        """Looks the family up, keeps its blocks in `hits`, and returns the length in tokens."""
        group = family.group
        size = group.block_size
        max_blocks = min(limit_tokens // size, len(view))
        if group.kind is GroupKind.FULL:
            found = full_hit(
                family.indexes,
                view,
                max_blocks=max_blocks,
                drops=drops,
                block_size=size,
                alignment=self.alignment,
            )
        elif group.kind is GroupKind.SLIDING:
            found = sliding_hit(
                family.indexes,
                view,
                max_blocks=max_blocks,
                run_blocks=ceil_div((group.window or 1) - 1, size) + drops,
                drops=drops,
                block_size=size,
                alignment=self.alignment,
            )
        else:
            skipped_blocks = group.skipped_tokens(limit_tokens) // size
            found = chunked_hit(family.indexes, view, max_blocks=max_blocks, skipped_blocks=skipped_blocks)
        for group_id, blocks in zip(family.group_ids, found, strict=True):
            hits[group_id] = blocks
        return len(found[0]) * size

    def _cut_full(self, hits: list[list[BlockId]], length_tokens: int) -> None:
        for family in self._families:
            if family.group.kind is GroupKind.FULL:
                for group_id in family.group_ids:
                    del hits[group_id][ceil_div(length_tokens, family.group.block_size) :]
