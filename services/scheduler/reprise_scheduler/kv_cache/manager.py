"""The KV cache manager: which blocks a request reuses, gets, and gives back.

Pure: no clock, no I/O, no randomness. It never hashes; requests bring their block hashes.
"""

from collections.abc import Sequence

from reprise_core.ids import BlockHash, BlockId, GroupId, RequestId
from reprise_core.kv_events import KvEvent
from reprise_scheduler.kv_cache.block_pool import BlockPool
from reprise_scheduler.kv_cache.caching import BlockCaching
from reprise_scheduler.kv_cache.config import NULL_BLOCK, GroupKind, KVCacheConfig
from reprise_scheduler.kv_cache.coordinator import Coordinator
from reprise_scheduler.kv_cache.event_log import EventLog
from reprise_scheduler.kv_cache.group import Group, ceil_div
from reprise_scheduler.kv_cache.request import CachedRequest, PrefixHit, RequestBlocks
from reprise_scheduler.kv_cache.stats import PrefixCacheStats


class KVCacheManager:
    """Invariants (see `check_invariants`): a block's reference count is the number of tables it is
    in, popped ones included; no table ever changes a place, except that blocks that left a window
    become null.
    """

    def __init__(
        self, config: KVCacheConfig, *, enable_events: bool = False, integer_hashes: bool = True
    ) -> None:
        """`integer_hashes`: events name blocks by the low 64 bits of their hashes, else by all bytes."""
        self.config = config
        self._groups = tuple(Group(GroupId(i), spec, config) for i, spec in enumerate(config.groups))
        self._events = EventLog(enabled=enable_events, integer_hashes=integer_hashes)
        self._pool = BlockPool(
            num_blocks=config.num_blocks,
            num_groups=len(self._groups),
            enable_caching=config.enable_caching,
            events=self._events,
        )
        self._coordinator = Coordinator(
            self._groups,
            self._pool.indexes,
            hash_block_size=config.hash_block_size,
            scheduler_block_size=config.scheduler_block_size,
        )
        self._caching = BlockCaching(config, self._groups, self._pool, self._events)
        self._requests: dict[RequestId, RequestBlocks] = {}
        self._stats = PrefixCacheStats()
        self._water = int(config.watermark * config.num_blocks)
        self._no_hit = PrefixHit(blocks=((),) * len(self._groups), num_tokens=0)
        first = self._groups[0]
        single = len(self._groups) == 1 and first.kind is GroupKind.FULL and first.hashes_per_block == 1
        self._single_block_size = first.block_size if single else 0

    # --- looking up ----------------------------------------------------------------------------

    def lookup(self, request: CachedRequest) -> PrefixHit:
        """The longest reusable prefix. Changes no block and holds none."""
        if not self.config.enable_caching or request.skip_lookup:
            request.junction_tokens = 0
            return self._no_hit
        hit = self._coordinator.longest_hit(request.block_hashes, len(request.token_ids) - 1)
        request.junction_tokens = hit.junction
        if request.report_full and hit.num_tokens:
            for group, blocks in zip(self._groups, hit.blocks, strict=True):
                if blocks:
                    self._events.stored(request, group, 0, len(blocks), block_size=group.block_size)
        return hit

    def record_admission(self, request: CachedRequest, num_hit_tokens: int) -> None:
        """Counts a request that starts now, with the tokens it did not have to compute."""
        if self.config.enable_caching and not request.skip_lookup:
            self._stats.record(
                num_tokens=len(request.token_ids),
                num_hit_tokens=num_hit_tokens,
                preempted=request.num_preemptions > 0,
            )

    # --- giving blocks -------------------------------------------------------------------------

    def allocate(
        self,
        request: CachedRequest,
        num_new_tokens: int,
        *,
        num_computed_tokens: int,
        hit: PrefixHit | None = None,
        num_external_tokens: int = 0,
        num_inflight_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        delay_caching: bool = False,
        must_fit: bool = False,
        reserved_blocks: int = 0,
        is_admission: bool = False,
        others_running: bool = False,
    ) -> list[list[BlockId]] | None:
        """Makes room for `num_new_tokens` more tokens (drafts included); None = refused.

        `hit` is adopted when the request holds no blocks yet. `num_external_tokens` follow the hit
        and will be loaded; `num_inflight_tokens` of the computed ones are not confirmed yet;
        `num_lookahead_tokens` are slots for draft heads. `must_fit` refuses unless the whole
        sequence fits; `reserved_blocks` have to stay free; an admission (of a waiting or preempted
        request) while others run leaves the watermark free too. With `delay_caching` the caller
        calls `cache_blocks` when the loads are done.

        Returns the new block ids per group, without adopted ones and those for external tokens. A
        refused call may have freed blocks that left a window; nothing else.
        """
        state = self._requests.get(request.request_id)
        if (
            self._single_block_size
            and state is not None
            and not (is_admission or must_fit or reserved_blocks or hit or num_external_tokens)
            and self._has_room(request, state, num_computed_tokens + num_new_tokens, num_lookahead_tokens)
        ):
            return [[]]
        max_model_len = self.config.max_model_len
        holds_blocks = state is not None and any(state.tables)
        num_computed = num_computed_tokens + num_external_tokens
        adopted = self._no_hit.blocks
        if hit is not None:
            num_computed += hit.num_tokens
            if not holds_blocks:
                adopted = hit.blocks
        total = min(num_computed, max_model_len)
        water = self._water if is_admission and others_running else 0
        if must_fit:
            whole = min(len(request.token_ids), max_model_len)
            if self._num_needed(state, adopted, whole, total, capped=True) + water > self._pool.num_free:
                return None
        if state is not None:
            self._trim(state, max(0, total - num_inflight_tokens))
        slots = min(total + num_new_tokens + num_lookahead_tokens, max_model_len)
        needed = self._num_needed(state, adopted, slots, num_computed, capped=False)
        if needed + water > self._pool.num_free - reserved_blocks:
            return None
        if state is None or not holds_blocks:
            state = self._adopt(request.request_id, adopted, num_computed, num_external_tokens)
        new_blocks = [self._extend(state.tables[group.id], group, slots) for group in self._groups]
        if self.config.enable_caching and not delay_caching:
            self._caching.cache(request, state, min(total + num_new_tokens, len(request.token_ids)))
        return new_blocks

    def _has_room(
        self, request: CachedRequest, state: RequestBlocks, num_tokens: int, num_lookahead: int
    ) -> bool:
        """One full group: no block is needed and none gets full. Most answer steps are like this."""
        size = self._single_block_size
        return (
            num_tokens + num_lookahead <= len(state.tables[0]) * size
            and min(num_tokens, len(request.token_ids)) < (state.num_cached[0] + 1) * size
        )

    def _num_needed(
        self,
        state: RequestBlocks | None,
        adopted: Sequence[Sequence[BlockId]],
        num_tokens: int,
        num_computed: int,
        *,
        capped: bool,
    ) -> int:
        """Free blocks that holding `num_tokens` tokens costs, hit blocks that are free included."""
        needed = 0
        for group in self._groups:
            blocks = adopted[group.id]
            required = ceil_div(num_tokens, group.block_size)
            if capped and group.max_admission_blocks is not None:
                required = min(required, group.max_admission_blocks)
            skipped = group.skipped_tokens(num_computed) // group.block_size
            present = max(skipped, len(blocks), len(state.tables[group.id]) if state else 0)
            needed += max(required - present, 0)
            if blocks:
                needed += self._pool.count_free(blocks[skipped:])
        return needed

    def _adopt(
        self,
        request_id: RequestId,
        adopted: Sequence[Sequence[BlockId]],
        num_computed: int,
        num_external_tokens: int,
    ) -> RequestBlocks:
        """Starts the request's tables with the hit, all of it before any block is taken."""
        state = self._requests[request_id] = RequestBlocks(len(self._groups))
        if not num_external_tokens and not any(adopted):
            return state
        for group in self._groups:
            skipped = group.skipped_tokens(num_computed) // group.block_size
            blocks = adopted[group.id][skipped:]
            self._pool.touch(blocks)
            table = state.tables[group.id]
            table += [NULL_BLOCK] * skipped
            table += blocks
            state.num_cached[group.id] = len(table)
        if num_external_tokens:
            for group in self._groups:
                self._extend(state.tables[group.id], group, num_computed)
        return state

    def _extend(self, table: list[BlockId], group: Group, num_tokens: int) -> list[BlockId]:
        num_new = ceil_div(num_tokens, group.block_size) - len(table)
        if num_new <= 0:
            return []
        new_blocks = self._pool.take(num_new)
        table += new_blocks
        return new_blocks

    def cache_blocks(self, request: CachedRequest, num_tokens: int) -> None:
        """Enters the request's full blocks up to token `num_tokens`, after a delayed allocation."""
        state = self._requests.get(request.request_id)
        if state is not None and self.config.enable_caching:
            self._caching.cache(request, state, num_tokens)

    # --- taking blocks back --------------------------------------------------------------------

    def free(self, request: CachedRequest) -> None:
        """Returns the blocks, each table's last first, so that a prefix outlives its continuation."""
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            for table in state.tables:
                self._pool.give_back(table[::-1])

    def pop_blocks(self, request: CachedRequest) -> list[BlockId]:
        """Forgets the request but keeps its blocks held, until `free_popped` gets this list."""
        state = self._requests.pop(request.request_id, None)
        return [block_id for table in state.tables for block_id in table if block_id] if state else []

    def free_popped(self, block_ids: Sequence[BlockId]) -> None:
        self._pool.give_back(block_ids[::-1])

    def trim(self, request: CachedRequest, num_tokens: int) -> None:
        """Returns blocks that nothing reads any more when `num_tokens` tokens are done."""
        state = self._requests.get(request.request_id)
        if state is not None:
            self._trim(state, num_tokens)

    def _trim(self, state: RequestBlocks, num_tokens: int) -> None:
        for group in self._groups:
            skipped = group.skipped_tokens(num_tokens) // group.block_size
            table = state.tables[group.id]
            returned = []
            for place in range(min(skipped, len(table)) - 1, -1, -1):
                if table[place] == NULL_BLOCK:
                    break
                returned.append(table[place])
                table[place] = NULL_BLOCK
            if returned:
                self._pool.give_back(returned)

    def evict(self, block_ids: Sequence[BlockId]) -> None:
        """Removes the hash entries of these blocks, in this order, held or not."""
        for block_id in block_ids:
            self._pool.unhash(block_id)

    def reset(self) -> bool:
        """Drops every hash entry; False, and nothing done, while any block is held."""
        if not self._pool.reset():
            return False
        self._stats.reset = True
        return True

    # --- asking --------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return self._pool.usage

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def block_ids(self, request_id: RequestId) -> tuple[list[BlockId], ...]:
        """Copies of the request's block tables, one per group; empty lists if it holds nothing."""
        state = self._requests.get(request_id)
        return tuple(map(list, state.tables)) if state else tuple([] for _ in self._groups)

    def block_hash_of(self, block_id: BlockId) -> BlockHash | None:
        """The hash of the block's own entry as it is now."""
        return self._pool.own_hash(block_id)

    def entries_of(self, block_id: BlockId) -> list[tuple[BlockHash, GroupId]]:
        """The block's hash entries: its own one first, additional ones in byte order."""
        return self._pool.entries(block_id)

    def free_block_ids(self) -> list[BlockId]:
        """The whole free queue, the next block to be taken first. Cost grows with the pool."""
        return list(self._pool.free_blocks())

    def ref_counts(self) -> Sequence[int]:
        """By block id; the null block's count is 0."""
        return tuple(self._pool.ref_counts)

    def take_events(self) -> list[KvEvent]:
        return self._events.take()

    def take_stats(self) -> PrefixCacheStats:
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def check_invariants(self) -> None:
        """Cost grows with the pool; for tests. Popped blocks must have been returned."""
        self._pool.check_invariants()
        holders = [0] * self.config.num_blocks
        for state in self._requests.values():
            for group, table in zip(self._groups, state.tables, strict=True):
                assert state.num_cached[group.id] >= 0
                for block_id in table:
                    holders[block_id] += 1
        holders[NULL_BLOCK] = 0
        assert holders == self._pool.ref_counts, "reference counts differ from the tables"
        if not self.config.enable_caching:
            assert not any(index.first for index in self._pool.indexes)
