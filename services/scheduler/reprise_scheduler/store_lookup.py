"""Asking the store what it has of a prompt, group by group.

The store answers a list of hashes up to the first that is missing. Full groups are asked from the front.
A windowed group needs only the blocks before the end of a hit, so it is asked from there backwards; where
one is missing within the window, a hit can only end before it, and it is asked again from there. A store
that has too many gaps is at last asked from the front: there every end is a good one.
"""

from collections.abc import Sequence

from reprise_core.ids import BlockHash
from reprise_scheduler.kv_cache.config import GroupKind
from reprise_scheduler.kv_cache.group import Group
from reprise_scheduler.ports import ExternalBlocks
from reprise_scheduler.sched.stored_blocks import NOTHING_STORED, StoredBlocks

MAX_BACKWARDS = 3
"""Times that windowed groups of one kind are asked from some end of one prompt."""


async def find_stored(
    external: ExternalBlocks,
    fingerprint: str,
    groups: Sequence[Group],
    block_hashes: Sequence[BlockHash],
    adapter: str = "",
) -> tuple[StoredBlocks, int]:
    """What the store has, and the generation it has it in. Raises RepriseError."""
    search = _Search(external, fingerprint, adapter)
    by_group: dict[int, tuple[str, ...]] = {}
    # Groups with the same specification are of use only together. Full ones first: they bound the rest.
    for family in sorted(_families(groups), key=lambda family: family[0].kind is not GroupKind.FULL):
        if family[0].kind is GroupKind.FULL:
            tiers = await search.ask(family, block_hashes)
            block_hashes = block_hashes[: len(tiers)]
        else:
            tiers = await search.backwards(family, block_hashes)
        by_group |= dict.fromkeys((group.id for group in family), tiers)
    assert search.generation is not None
    if search.changed:
        return NOTHING_STORED, search.generation
    return StoredBlocks(tuple(by_group[group.id] for group in groups)), search.generation


def _families(groups: Sequence[Group]) -> list[list[Group]]:
    families: dict[object, list[Group]] = {}
    for group in groups:
        families.setdefault(group.spec, []).append(group)
    return list(families.values())


class _Search:
    """The calls for one prompt."""

    def __init__(self, external: ExternalBlocks, fingerprint: str, adapter: str) -> None:
        self._external = external
        self._fingerprint = fingerprint
        self._adapter = adapter
        self.generation: int | None = None
        self.changed = False
        """A reset came between two calls: what was found is gone."""

    async def ask(self, family: Sequence[Group], block_hashes: Sequence[BlockHash]) -> tuple[str, ...]:
        """A tier per block in the order asked, up to the first that is missing."""
        tiers, generation = await self._external.lookup(
            self._fingerprint, [group.id for group in family], block_hashes, self._adapter
        )
        self.changed |= self.generation not in (None, generation)
        self.generation = generation
        return tiers

    async def backwards(self, family: Sequence[Group], block_hashes: Sequence[BlockHash]) -> tuple[str, ...]:
        """A tier per block, empty where it is missing or unknown."""
        tiers = [""] * len(block_hashes)
        group = family[0]
        end = len(block_hashes)
        for _ in range(MAX_BACKWARDS):
            if end <= 0:
                break
            found = await self.ask(family, block_hashes[:end][::-1])
            tiers[end - len(found) : end] = found[::-1]
            num_read = end - group.skipped_tokens(end * group.block_size) // group.block_size
            if len(found) >= num_read:
                return tuple(tiers)
            end -= len(found) + 1
        if end > 0:
            found = await self.ask(family, block_hashes[:end])
            tiers[: len(found)] = found
        return tuple(tiers)
