"""Giving full blocks their hash entries.

A step's blocks are entered when the step is planned: within a step every layer writes all keys and
values before any is read, so another request of the same step may hit them.
"""

from collections.abc import Sequence

from reprise_core.ids import BlockId
from reprise_scheduler.kv_cache.block_pool import BlockPool
from reprise_scheduler.kv_cache.config import GroupKind, KVCacheConfig
from reprise_scheduler.kv_cache.event_log import EventLog
from reprise_scheduler.kv_cache.eviction import EvictionPolicy
from reprise_scheduler.kv_cache.group import NEVER, Group
from reprise_scheduler.kv_cache.observer import EntryObserver
from reprise_scheduler.kv_cache.request import CachedRequest, RequestBlocks
from reprise_scheduler.kv_cache.retention import WindowRetention


class BlockCaching:
    """Enters the blocks of one request, group after group, as far as they can be hit later."""

    def __init__(
        self,
        config: KVCacheConfig,
        groups: Sequence[Group],
        pool: BlockPool,
        events: EventLog,
        *,
        policy: EvictionPolicy | None = None,
        observers: Sequence[EntryObserver] = (),
    ) -> None:
        """`policy` is given only where it says what to keep."""
        self._groups = groups
        self._pool = pool
        self._events = events
        self._policy = policy
        self._observers = tuple(observers)
        # Prompt tokens whose hidden states a draft head has not seen yet when they are computed.
        self._unsettled = max(0, config.num_prefill_lookahead - 1)
        self._unit = config.scheduler_block_size
        self._hash_block_size = config.hash_block_size
        self._any_drops = any(config.drops)
        self._any_tails = any(g.kind is GroupKind.FULL and g.hashes_per_block > 1 for g in groups)
        self._enabled = config.enable_caching
        self._retention = tuple(
            WindowRetention(
                group,
                interval=config.retention_interval,
                scheduler_block_size=config.scheduler_block_size,
                any_drops=self._any_drops,
            )
            if group.kind is GroupKind.SLIDING
            else None
            for group in groups
        )

    def cache(self, request: CachedRequest, state: RequestBlocks, num_tokens: int) -> None:
        """Tokens up to `num_tokens`, all of them known, are or will be computed by this step."""
        for group in self._groups:
            reachable = self._reachable(group, num_tokens)
            first = state.num_cached[group.id]
            end = reachable // group.block_size
            if first < end:
                self._cache_range(request, state.tables[group.id], group, first, end)
                state.num_cached[group.id] = end
            if group.hashes_per_block > 1 and group.kind is GroupKind.FULL:
                self._cache_tail(request, state.tables[group.id], group, reachable)

    def next_change(self, num_tokens: int) -> int:
        """Below this many tokens nothing can be cached that `cache` at `num_tokens` has not; 0 if that
        cannot be said.

        A prompt's tail may have to be entered again at any time: another request that shares the
        block can have replaced it by a longer one.
        """
        if not self._enabled:
            return NEVER
        if self._any_tails:
            return 0
        several = len(self._groups) > 1
        coarse = num_tokens - num_tokens % self._unit + self._unit if several else NEVER
        if several and not self._any_drops:
            return coarse
        settled = max(0, num_tokens - self._unsettled)
        fine = settled - settled % self._hash_block_size + self._hash_block_size + self._unsettled
        return min(coarse, fine)

    def _reachable(self, group: Group, num_tokens: int) -> int:
        """Up to which token a hit in this group can end.

        Over several groups hits end at multiples of the scheduler block size, and a dropping group
        needs one block more.
        """
        settled = max(0, num_tokens - self._unsettled)
        if len(self._groups) == 1:
            return settled
        reachable = num_tokens - num_tokens % self._unit
        if group.drops and reachable:
            return min(settled, settled - settled % self._unit + group.block_size)
        return reachable

    def _cache_range(
        self, request: CachedRequest, table: Sequence[BlockId], group: Group, first: int, end: int
    ) -> None:
        blocks = table[first:end]
        ratio = group.hashes_per_block
        hashes = request.block_hashes[(first + 1) * ratio - 1 : end * ratio : ratio]
        kept = self._kept(request, group, blocks, first, end)
        if kept is not None:
            blocks = [blocks[i] for i in kept]
            hashes = [hashes[i] for i in kept]
        elif len(blocks) < len(hashes):
            # Past the model's limit a request may be longer than its table.
            kept = range(len(blocks))
            hashes = hashes[: len(blocks)]
        self._pool.register_full(blocks, hashes, group.id)
        for observer in self._observers:
            places = range(first, first + len(blocks)) if kept is None else [first + i for i in kept]
            observer.entered(request, group, places, blocks)
        self._events.stored(request, group, first, end, block_size=group.block_size, kept=kept)

    def _kept(
        self, request: CachedRequest, group: Group, blocks: Sequence[BlockId], first: int, end: int
    ) -> Sequence[int] | None:
        """The places in the range that get an entry; None = all."""
        if self._policy is not None:
            chosen = self._policy.keeps(request, group, first, end)
            if chosen is not None:
                kept = self._window_kept(request, group, blocks, first, end)
                return [i for i in (range(len(blocks)) if kept is None else kept) if chosen[i]]
        return self._window_kept(request, group, blocks, first, end)

    def _window_kept(
        self, request: CachedRequest, group: Group, blocks: Sequence[BlockId], first: int, end: int
    ) -> Sequence[int] | None:
        if group.kind is GroupKind.FULL:
            return None
        retention = self._retention[group.id]
        mask = None
        if retention is not None:
            mask = retention.keeps(
                first,
                end,
                num_prompt_tokens=request.num_prompt_tokens,
                junction_tokens=request.junction_tokens,
            )
        return [i for i, block_id in enumerate(blocks) if block_id and (mask is None or mask[i])]

    def _cache_tail(
        self, request: CachedRequest, table: Sequence[BlockId], group: Group, reachable: int
    ) -> None:
        """The prompt's last whole hash block, when it ends inside a block of a coarser group."""
        size = group.hash_block_size
        end = request.num_prompt_tokens - (not group.drops)
        end -= end % size
        place = end // group.block_size
        if not 0 < end <= reachable or end % group.block_size == 0 or place >= len(table):
            return
        block_id = table[place]
        last_hash = end // size
        if block_id and self._pool.register_tail(
            block_id, request.block_hashes[last_hash - 1], group.id, end
        ):
            self._events.stored(request, group, last_hash - 1, last_hash, block_size=size)
