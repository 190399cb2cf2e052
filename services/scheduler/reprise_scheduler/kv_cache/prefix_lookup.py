"""Looking a request up: the coordinator's search, and what is optional around it."""

from collections.abc import Sequence
from itertools import repeat

from reprise_core.ids import BlockId
from reprise_scheduler.kv_cache.config import NULL_BLOCK
from reprise_scheduler.kv_cache.coordinator import Coordinator
from reprise_scheduler.kv_cache.group import Group
from reprise_scheduler.kv_cache.hash_index import HashIndex
from reprise_scheduler.kv_cache.request import CachedRequest, PrefixHit
from reprise_scheduler.kv_cache.verification import TokenVerifier


class PrefixLookup:
    """Changes nothing. Without options, one search below the request's last token."""

    def __init__(
        self,
        coordinator: Coordinator,
        groups: Sequence[Group],
        indexes: Sequence[HashIndex],
        *,
        verifier: TokenVerifier | None,
        full_prompt_hit: bool,
    ) -> None:
        self._coordinator = coordinator
        self._groups = groups
        self._indexes = indexes
        self._verifier = verifier
        self._full_prompt_hit = full_prompt_hit

    def hit(self, request: CachedRequest, *, allow_copy: bool = True) -> PrefixHit:
        if self._full_prompt_hit and allow_copy:
            hit = self._whole(request)
            if hit is not None:
                return hit
        return self._longest(request, max(0, len(request.token_ids) - 1))

    def _longest(self, request: CachedRequest, limit_tokens: int) -> PrefixHit:
        """With verification, the longest hit whose blocks hold the request's own tokens."""
        while True:
            hit = self._coordinator.longest_hit(request.block_hashes, limit_tokens)
            end = self._verified_end(request, hit) if self._verifier else None
            if end is None:
                return hit
            limit_tokens = end

    def _verified_end(self, request: CachedRequest, hit: PrefixHit) -> int | None:
        """The token before which every group's blocks are what they should be; None = all are."""
        assert self._verifier is not None
        ends = []
        for group, blocks in zip(self._groups, hit.blocks, strict=True):
            place = self._verifier.first_collision(request, group, blocks)
            if place is not None:
                ends.append(place * group.block_size)
        return min(ends, default=None)

    def _whole(self, request: CachedRequest) -> PrefixHit | None:
        """The hit of a request whose every token is in a cached block; None if it is not so."""
        num_tokens = len(request.token_ids)
        hashes = request.block_hashes
        if not hashes or num_tokens % self._coordinator.alignment or hashes[-1] not in self._indexes[0].first:
            return None
        whole = self._longest(request, num_tokens)
        if whole.num_tokens < num_tokens:
            return None
        # The last token is computed again: its window may reach further back than a hit of all tokens does.
        before = self._longest(request, num_tokens - self._coordinator.alignment)
        blocks = tuple(map(_merged, whole.blocks, before.blocks))
        for group, adopted, found in zip(self._groups, blocks, whole.blocks, strict=True):
            first_read = group.skipped_tokens(num_tokens - 1) // group.block_size
            if not all(adopted[first_read:]) or not found[-1]:
                return None
        return PrefixHit(
            blocks=blocks,
            num_tokens=num_tokens - 1,
            copy_sources=tuple(found[-1] for found in whole.blocks),
        )


def _merged(whole: Sequence[BlockId], before: Sequence[BlockId]) -> tuple[BlockId, ...]:
    """All blocks but the last, each from whichever hit has it."""
    others = (*before, *repeat(NULL_BLOCK, len(whole)))
    return tuple(one or other for one, other in zip(whole[:-1], others, strict=False))
