"""Why the first block that missed was not there."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from reprise_core.ids import BlockHash, BlockId, GroupId
from reprise_scheduler.kv_cache.config import GroupKind
from reprise_scheduler.kv_cache.group import Group
from reprise_scheduler.kv_cache.hash_index import HashIndex
from reprise_scheduler.kv_cache.observer import EntryObserver
from reprise_scheduler.kv_cache.request import CachedRequest, PrefixHit

K = TypeVar("K")
V = TypeVar("V")

MAX_EVICTED = 65_536
MAX_FIRST_BLOCKS = 4_096
MAX_NAMESPACES = 8


class MissKind(StrEnum):
    LOOKUP_SKIPPED = "lookup_skipped"  # `rule` says by which rule.
    BELOW_ONE_BLOCK = "below_one_block"  # Less than one block of tokens is left.
    HIT_CAP = "hit_cap"  # The last token must be computed, so its block cannot be hit.
    NEVER_SEEN = "never_seen"  # As far as is remembered.
    EVICTED = "evicted"  # `evicted_ago` says how long ago.
    OTHER_NAMESPACE = "other_namespace"  # The same tokens are cached under another salt or adapter.
    LOAD_SKIPPED = "load_skipped"  # The store has more, but loading is not worth it; `rule` says why.
    SHORTENED = "shortened"  # Cached, but a rule of the groups shortened the hit.


@dataclass(frozen=True, slots=True)
class MissReason:
    kind: MissKind
    token_index: int = 0
    """Where the hit ended."""
    group_id: GroupId | None = None
    evicted_ago: int | None = None
    """Blocks that were handed out since the eviction."""
    rule: str | None = None


class MissTracker(EntryObserver):
    """Remembers the latest evictions and under which namespaces prompts began.

    Bounded: the oldest of more than `MAX_EVICTED` evicted hashes, `MAX_FIRST_BLOCKS` first blocks, or
    `MAX_NAMESPACES` namespaces of one first block are forgotten.
    """

    def __init__(self, num_taken: Callable[[], int]) -> None:
        self._num_taken = num_taken
        self._evicted: OrderedDict[tuple[BlockHash, GroupId], int] = OrderedDict()
        self._first_blocks: OrderedDict[tuple[int, ...], OrderedDict[object, None]] = OrderedDict()

    def entered(
        self, request: CachedRequest, group: Group, places: Sequence[int], block_ids: Sequence[BlockId]
    ) -> None:
        if places and places[0] == 0:
            namespaces = self._first_blocks.setdefault(_first_block(request, group), OrderedDict())
            _remember(namespaces, _namespace(request), None, MAX_NAMESPACES)
            self._first_blocks.move_to_end(_first_block(request, group))
            if len(self._first_blocks) > MAX_FIRST_BLOCKS:
                self._first_blocks.popitem(last=False)

    def removed(self, block_id: BlockId, block_hash: BlockHash, group_id: GroupId) -> None:
        _remember(self._evicted, (block_hash, group_id), self._num_taken(), MAX_EVICTED)

    def clearing(self, entries: Sequence[tuple[BlockHash, GroupId]]) -> None:
        for entry in entries:
            _remember(self._evicted, entry, self._num_taken(), MAX_EVICTED)

    def explain(
        self,
        request: CachedRequest,
        hit: PrefixHit,
        groups: Sequence[Group],
        indexes: Sequence[HashIndex],
        *,
        alignment: int,
    ) -> MissReason:
        """Why the hit of a look-up that was made just now is not longer. `alignment` in tokens."""
        num_tokens = len(request.token_ids)
        end = hit.num_tokens + alignment
        if end > num_tokens:
            return MissReason(MissKind.BELOW_ONE_BLOCK, hit.num_tokens)
        if end > num_tokens - 1:
            return MissReason(MissKind.HIT_CAP, hit.num_tokens)
        for group in sorted(groups, key=lambda group: group.kind is not GroupKind.FULL):
            for place in range(hit.num_tokens // group.block_size, end // group.block_size):
                block_hash = request.block_hashes[(place + 1) * group.hashes_per_block - 1]
                if block_hash not in indexes[group.id].first:
                    return self._explain_block(request, group, place, block_hash)
        return MissReason(MissKind.SHORTENED, hit.num_tokens)

    def _explain_block(
        self, request: CachedRequest, group: Group, place: int, block_hash: BlockHash
    ) -> MissReason:
        token_index = place * group.block_size
        evicted_at = self._evicted.get((block_hash, group.id))
        if evicted_at is not None:
            ago = self._num_taken() - evicted_at
            return MissReason(MissKind.EVICTED, token_index, group.id, evicted_ago=ago)
        if place == 0:
            namespaces = self._first_blocks.get(_first_block(request, group), ())
            if any(namespace != _namespace(request) for namespace in namespaces):
                return MissReason(MissKind.OTHER_NAMESPACE, token_index, group.id)
        return MissReason(MissKind.NEVER_SEEN, token_index, group.id)


def _first_block(request: CachedRequest, group: Group) -> tuple[int, ...]:
    return tuple(request.token_ids[: group.block_size])


def _namespace(request: CachedRequest) -> object:
    lora = request.lora
    return (lora.name, lora.path) if lora else None, request.cache_salt or None


def _remember(memory: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > limit:
        memory.popitem(last=False)
