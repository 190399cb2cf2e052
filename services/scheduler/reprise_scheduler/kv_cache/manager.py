"""The KV cache manager: which blocks a request reuses, gets, and gives back.

Pure: no clock, no I/O, no randomness. It never hashes; requests bring their block hashes.
"""

from collections.abc import Sequence

from reprise_core.errors import FailedPrecondition
from reprise_core.ids import BlockHash, BlockId, GroupId, RequestId
from reprise_core.kv_events import KvEvent
from reprise_scheduler.kv_cache.block_pool import BlockPool
from reprise_scheduler.kv_cache.block_tables import BlockTables
from reprise_scheduler.kv_cache.caching import BlockCaching
from reprise_scheduler.kv_cache.config import NULL_BLOCK, KVCacheConfig
from reprise_scheduler.kv_cache.coordinator import Coordinator
from reprise_scheduler.kv_cache.event_log import EventLog
from reprise_scheduler.kv_cache.eviction import EvictionPolicy
from reprise_scheduler.kv_cache.group import Group
from reprise_scheduler.kv_cache.miss_reasons import MissKind, MissReason, MissTracker
from reprise_scheduler.kv_cache.pins import Pin, Pins
from reprise_scheduler.kv_cache.prefix_lookup import PrefixLookup
from reprise_scheduler.kv_cache.request import BlockCopy, CachedRequest, PrefixHit, RequestBlocks
from reprise_scheduler.kv_cache.stats import PrefixCacheStats
from reprise_scheduler.kv_cache.verification import TokenVerifier


class KVCacheManager:
    """Invariant (see `check_invariants`): a block's reference count is the number of tables, pins and
    pending copies it is in, popped tables included.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        enable_events: bool = False,
        integer_hashes: bool = True,
        mark_reports: bool = False,
        eviction_policy: EvictionPolicy | None = None,
    ) -> None:
        """`integer_hashes`: events name blocks by the low 64 bits of their hashes, else by all bytes.
        `mark_reports`: stored events that name resident blocks again say so, which the reference's do not.
        `eviction_policy` was made for this pool; None = least recently used.
        """
        self.config = config
        self._groups = tuple(Group(GroupId(i), spec, config) for i, spec in enumerate(config.groups))
        self._events = EventLog(
            enabled=enable_events, integer_hashes=integer_hashes, mark_reports=mark_reports
        )
        self._verifier = TokenVerifier() if config.verify_tokens else None
        self._misses = MissTracker(lambda: self._pool.num_taken) if config.track_misses else None
        observing = eviction_policy if eviction_policy is not None and eviction_policy.observes else None
        observers = [o for o in (self._verifier, self._misses, observing) if o is not None]
        self._pool = BlockPool(
            num_blocks=config.num_blocks,
            num_groups=len(self._groups),
            events=self._events,
            policy=eviction_policy,
            observers=observers,
        )
        self._coordinator = Coordinator(
            self._groups,
            self._pool.indexes,
            hash_block_size=config.hash_block_size,
            scheduler_block_size=config.scheduler_block_size,
        )
        self._lookup = PrefixLookup(
            self._coordinator,
            self._groups,
            self._pool.indexes,
            verifier=self._verifier,
            full_prompt_hit=config.full_prompt_hit,
        )
        self._caching = BlockCaching(
            config, self._groups, self._pool, self._events, policy=observing, observers=observers
        )
        self._tables = BlockTables(self._groups, self._pool, observers)
        self._pins = Pins(self._pool, max_blocks=config.max_pinned_blocks)
        self._copies: list[BlockCopy] = []
        self._stats = PrefixCacheStats()
        self._water = int(config.watermark * config.num_blocks)
        self._no_hit = PrefixHit(blocks=((),) * len(self._groups), num_tokens=0)

    # --- looking up ----------------------------------------------------------------------------

    @property
    def alignment(self) -> int:
        """Hits are multiples of this many tokens (but for full-prompt hits)."""
        return self._coordinator.alignment

    def lookup(self, request: CachedRequest, *, allow_copy: bool = True) -> PrefixHit:
        """The longest reusable prefix. Changes no block and holds none.

        Without `allow_copy` it has no `copy_sources`: those must be filled before the step that copies
        them, which only the caller knows.
        """
        if not self.config.enable_caching or request.skip_lookup:
            request.junction_tokens = 0
            return self._no_hit
        hit = self._lookup.hit(request, allow_copy=allow_copy)
        request.junction_tokens = hit.junction
        if request.report_full and hit.num_tokens:
            for group, blocks in zip(self._groups, hit.blocks, strict=True):
                if blocks:
                    self._events.reported(request, group, len(blocks))
        return hit

    def explain_miss(
        self, request: CachedRequest, hit: PrefixHit, *, skip_rule: str = "every prompt position is needed"
    ) -> MissReason:
        """Why `hit`, just looked up, is not longer. Needs `track_misses`.

        `skip_rule` is the caller's rule by which the request skips look-ups.
        """
        assert self._misses is not None, "explain_miss needs track_misses"
        if not self.config.enable_caching:
            return MissReason(MissKind.LOOKUP_SKIPPED, rule="prefix caching is off")
        if request.skip_lookup:
            return MissReason(MissKind.LOOKUP_SKIPPED, rule=skip_rule)
        indexes = self._pool.indexes
        return self._misses.explain(request, hit, self._groups, indexes, alignment=self.alignment)

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
        state = self._tables.find(request.request_id)
        num_tokens = num_computed_tokens + num_new_tokens
        if (  # Most answer steps need no block, fill none, and move no window over one.
            state is not None
            and num_tokens + num_lookahead_tokens <= state.capacity
            and min(num_tokens, len(request.token_ids)) < state.next_cache
            and num_computed_tokens - num_inflight_tokens < state.next_trim
            and not (is_admission or must_fit or reserved_blocks or hit or num_external_tokens)
        ):
            return [[] for _ in self._groups]
        tables, max_model_len = self._tables, self.config.max_model_len
        adopting = hit if state is None or not any(state.tables) else None
        adopted, sources = (adopting or self._no_hit).blocks, (adopting or self._no_hit).copy_sources
        num_computed = num_computed_tokens + num_external_tokens + (hit.num_tokens if hit else 0)
        total = min(num_computed, max_model_len)
        water = self._water if is_admission and others_running else 0
        if must_fit:
            whole = min(len(request.token_ids), max_model_len)
            if tables.needed(state, adopted, whole, total, capped=True) > self._pool.num_free - water:
                return None
        if state is not None:
            tables.trim(state, max(0, total - num_inflight_tokens))
        slots = min(total + num_new_tokens + num_lookahead_tokens, max_model_len)
        needed = tables.needed(state, adopted, slots, num_computed) + self._pool.count_free(sources)
        if needed > self._pool.num_free - water - reserved_blocks:
            return None
        if state is None or not any(state.tables):
            self._pool.touch(sources)
            state = tables.adopt(request, adopted, num_computed, num_external_tokens)
        new_blocks = tables.extend(state, slots)
        for group, source in zip(self._groups, sources, strict=False):
            self._copies.append(BlockCopy(group.id, source, new_blocks[group.id][0]))
        known = min(total + num_new_tokens, len(request.token_ids))
        if self.config.enable_caching and not delay_caching:
            self._caching.cache(request, state, known)
        self._note_quiet(state, known, max(0, total - num_inflight_tokens), cached=not delay_caching)
        return new_blocks

    def _note_quiet(self, state: RequestBlocks, known: int, trimmed: int, *, cached: bool) -> None:
        """Notes up to where further calls for this request have nothing to do."""
        groups, tables = self._groups, state.tables
        state.capacity = min(len(tables[group.id]) * group.block_size for group in groups)
        state.next_trim = min(group.next_skip(trimmed) for group in groups)
        state.next_cache = self._caching.next_change(known) if cached else 0

    def cache_blocks(self, request: CachedRequest, num_tokens: int) -> None:
        """Enters the request's full blocks up to token `num_tokens`, after a delayed allocation."""
        state = self._tables.find(request.request_id)
        if state is not None and self.config.enable_caching:
            self._caching.cache(request, state, num_tokens)

    def take_copies(self) -> list[BlockCopy]:
        """Block copies that this step's plan must carry; after each planning, before the next.

        Until then the sources are held, so that nothing of the same plan is written to them.
        """
        copies, self._copies = self._copies, []
        self._pool.give_back([copy.source for copy in copies])
        return copies

    # --- taking blocks back --------------------------------------------------------------------

    def free(self, request: CachedRequest) -> None:
        """Returns the request's blocks."""
        self._tables.free(request.request_id)

    def pop_blocks(self, request: CachedRequest) -> list[BlockId]:
        """Forgets the request but keeps its blocks held, until `free_popped` gets this list."""
        return self._tables.pop(request.request_id)

    def free_popped(self, block_ids: Sequence[BlockId]) -> None:
        self._pool.give_back(block_ids[::-1])

    def trim(self, request: CachedRequest, num_tokens: int) -> None:
        """Returns blocks that nothing reads any more when `num_tokens` tokens are done."""
        state = self._tables.find(request.request_id)
        if state is not None:
            self._tables.trim(state, num_tokens)

    def evict(self, block_ids: Sequence[BlockId]) -> None:
        """Removes the hash entries of these blocks, in this order, held or not."""
        for block_id in block_ids:
            self._pool.unhash(block_id)

    def reset(self) -> bool:
        """Drops every hash entry, and pins; False, and nothing done, while a request holds any block."""
        if self._pins.holds_all_used():
            for pin in self._pins.all():
                self._pins.remove(pin.pin_id)
        if not self._pool.reset():
            return False
        self._stats.reset = True
        return True

    # --- pins ----------------------------------------------------------------------------------

    def pin_prefix(
        self, request: CachedRequest, *, num_tokens: int | None = None, expires_at: float | None = None
    ) -> Pin | None:
        """Keeps the cached blocks of the request's first `num_tokens` tokens (None = its prompt).

        The request holds blocks now. `expires_at` is on the clock of `expire_pins`, in seconds or
        steps as the caller likes. None = refused by `max_pinned_blocks`, or nothing is cached.
        """
        state = self._tables.find(request.request_id)
        if state is None:
            raise FailedPrecondition(f"request {request.request_id} holds no blocks that could be pinned")
        if num_tokens is None:
            num_tokens = request.num_prompt_tokens
        pinned = []
        for group in self._groups:
            table = state.tables[group.id][: num_tokens // group.block_size]
            pinned += [b for b in table if b and self._pool.own_hash(b) is not None]
        if not pinned:
            return None
        return self._pins.add(pinned, tenant=request.tenant, num_tokens=num_tokens, expires_at=expires_at)

    def unpin(self, pin_id: int) -> bool:
        """False if there is no such pin, any more or at all."""
        return self._pins.remove(pin_id)

    def expire_pins(self, now: float) -> list[Pin]:
        """Lets go of the pins whose time has come, and returns them."""
        return self._pins.expire(now)

    def pins(self) -> list[Pin]:
        return self._pins.all()

    @property
    def num_pinned_blocks(self) -> int:
        return self._pins.num_blocks

    @property
    def num_pins_refused(self) -> int:
        return self._pins.num_refused

    # --- asking --------------------------------------------------------------------------------

    @property
    def groups(self) -> Sequence[Group]:
        return self._groups

    @property
    def has_cached_blocks(self) -> bool:
        return any(index.first for index in self._pool.indexes)

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return self._pool.usage

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_collisions(self) -> int:
        """Hits that verification refused: same hash, other tokens."""
        return self._verifier.num_collisions if self._verifier else 0

    def block_ids(self, request_id: RequestId) -> tuple[list[BlockId], ...]:
        """Copies of the request's block tables, one per group; empty lists if it holds nothing."""
        return self._tables.copies(request_id)

    def block_hash_of(self, block_id: BlockId) -> BlockHash | None:
        """The hash of the block's own entry as it is now."""
        return self._pool.own_hash(block_id)

    def block_hashes(self) -> Sequence[BlockHash | None]:
        """By block id, as they are now. Cost grows with the pool."""
        return self._pool.own_hashes()

    def holds(self, block_id: BlockId, group_id: GroupId, block_hash: BlockHash) -> bool:
        """Whether this is the block's own entry now: it may have been handed to another group since."""
        return self._pool.holds(block_id, group_id, block_hash)

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
        self._tables.add_holders(holders)
        self._pins.add_holders(holders)
        for copy in self._copies:
            holders[copy.source] += 1
        holders[NULL_BLOCK] = 0
        assert holders == self._pool.ref_counts, "reference counts differ from the holders"
        if not self.config.enable_caching:
            assert not any(index.first for index in self._pool.indexes)
