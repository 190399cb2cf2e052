"""The store itself: host memory in front of an external tier, one generation per model.

Every answer is true for a generation: it is read from Redis after the blocks, in the same round trip.
While Redis is away the last known one holds, because a reset needs Redis to be there.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from reprise_core.errors import RepriseError
from reprise_core.ids import BlockHash
from reprise_store.external_tier import ExternalTier
from reprise_store.generations import Generations
from reprise_store.keys import Scope, scope_of
from reprise_store.memory_backend import MemoryBackend
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import BackendBusy, BackendDown, Value
from reprise_store.write_behind import Pending, WriteBehind
from reprise_wire.block_transfer import BlockKey, Keyspace, redis_key
from reprise_wire.store_codec import StoreLookup, StoreStats, StoreTier

MAX_GENERATION_RACES = 3
"""Look-ups started over because a reset came between; then the answer is "nothing found"."""
MAX_SWEEPS_WAITING = 256
"""Scopes whose old blocks wait to be deleted; beyond it they are left to expiry and eviction."""


class GenerationChanged(RepriseError):
    """The transfer began before a reset."""

    def __init__(self, begun: int, now: int) -> None:
        super().__init__(f"began with generation {begun}, now {now}")


@dataclass(frozen=True, slots=True)
class Loaded:
    values: list[Value | None]
    num_host: int
    num_external: int


class TieredStore:
    def __init__(
        self,
        host: MemoryBackend,
        *,
        external: ExternalTier | None,
        write_behind: WriteBehind | None,
        generations: Generations,
        lookup_chunk_keys: int,
        metrics: StoreMetrics,
    ) -> None:
        self._host = host
        self._external = external
        self._write_behind = write_behind
        self._generations = generations
        self._lookup_chunk_keys = lookup_chunk_keys
        self._metrics = metrics
        self._sweeps: deque[Scope] = deque(maxlen=MAX_SWEEPS_WAITING)
        self._num_loads = 0
        self._num_saves = 0
        metrics.host_capacity_bytes.set(host.capacity_bytes)

    async def lookup(
        self, keyspace: Keyspace, group_ids: Sequence[int], block_hashes: Sequence[BlockHash]
    ) -> StoreLookup:
        """Tiers of the blocks from the front; a block counts when every group and rank has it.

        A block whose parts lie in different tiers is named after the slowest of them.
        """
        generation = await self._current_generation(scope_of(keyspace))
        for _ in range(MAX_GENERATION_RACES):
            tiers, seen = await self._lookup_at(keyspace, generation, group_ids, block_hashes)
            if seen == generation:
                self._count_lookup(len(block_hashes), tiers)
                return StoreLookup(generation=generation, tiers=tuple(tiers))
            generation = seen
        return StoreLookup(generation=generation, tiers=())

    async def save(
        self, keyspace: Keyspace, generation: int, items: Sequence[tuple[BlockKey, Value]]
    ) -> list[bool]:
        """Per block whether any tier took it. Waits for Redis only to learn an unknown generation."""
        scope = scope_of(keyspace)
        known = self._generations.get(scope)
        self._check_generation(
            generation, known if known is not None else await self._current_generation(scope)
        )
        return [self._save_one(scope, keyspace, generation, key, value) for key, value in items]

    async def load(self, keyspace: Keyspace, generation: int, keys: Sequence[BlockKey]) -> Loaded:
        """Values in the keys' order, None where no tier has one (or Redis cannot be asked)."""
        scope = scope_of(keyspace)
        names = [redis_key(keyspace, generation, key) for key in keys]
        values = [self._host.take(name) for name in names]
        missing = [index for index, value in enumerate(values) if value is None]
        fetched, now = await self._fetch(scope, [names[index] for index in missing])
        self._check_generation(generation, now)
        for index, value in zip(missing, fetched, strict=True):
            values[index] = value
            if value is not None:
                self._host.keep(scope, names[index], value)
        num_external = sum(value is not None for value in fetched)
        loaded = Loaded(values, len(keys) - len(missing), num_external)
        self._count_load(loaded, values, fetched)
        return loaded

    async def reset(self, keyspace: Keyspace) -> int:
        """The new generation. Raises BackendDown when Redis is configured and did not take it: then the
        blocks are all still there, in every tier."""
        scope = scope_of(keyspace)
        authority = self._external or self._host
        try:
            generation = await authority.advance_generation(scope, self._generations.proposal(scope))
        except RepriseError:
            self._metrics.resets.labels("failed").inc()
            raise
        self._learn(scope, generation)
        self._host.clear(scope)
        if self._external is not None and scope not in self._sweeps:
            self._sweeps.append(scope)
        self._metrics.resets.labels("done").inc()
        self.show()
        return generation

    async def sweep_once(self) -> None:
        """Deletes old generations of one scope from Redis, if any wait; called in the background."""
        if self._external is None or not self._sweeps:
            return
        scope = self._sweeps.popleft()
        try:
            generation = await self._current_generation(scope, fresh=True)
            num_deleted = await self._external.delete_stale(scope, generation)
        except (BackendDown, BackendBusy):
            self._sweeps.append(scope)
            return
        self._metrics.swept_blocks.inc(num_deleted)

    def stats(self) -> StoreStats:
        return StoreStats(
            host_bytes=self._host.num_bytes,
            host_capacity_bytes=self._host.capacity_bytes,
            host_blocks=self._host.num_blocks,
            redis_connected=self._external is not None and self._external.up,
            loads=self._num_loads,
            saves=self._num_saves,
            dropped_saves=self._write_behind.num_dropped if self._write_behind else 0,
        )

    def show(self) -> None:
        """Brings the gauges up to date."""
        self._metrics.host_bytes.set(self._host.num_bytes)
        self._metrics.host_blocks.set(self._host.num_blocks)

    async def _lookup_at(
        self,
        keyspace: Keyspace,
        generation: int,
        group_ids: Sequence[int],
        block_hashes: Sequence[BlockHash],
    ) -> tuple[list[StoreTier], int]:
        """Tiers under this generation, and the generation seen after the last block was asked for."""
        scope, seen = scope_of(keyspace), generation
        tiers: list[StoreTier] = []
        parts = [(rank, group_id) for group_id in group_ids for rank in range(keyspace.tp_size)]
        blocks_per_chunk = max(1, self._lookup_chunk_keys // len(parts))
        for start in range(0, max(1, len(block_hashes)), blocks_per_chunk):
            chunk = block_hashes[start : start + blocks_per_chunk]
            names = [
                [redis_key(keyspace, generation, BlockKey(rank, group_id, block)) for rank, group_id in parts]
                for block in chunk
            ]
            absent = [name for block in names for name in block if not self._host.has(name)]
            found, seen = await self._find(scope, absent)
            chunk_tiers = _tiers_of(names, set(absent), found)
            tiers += chunk_tiers
            if seen != generation or len(chunk_tiers) < len(chunk):
                break
        return tiers, seen

    async def _find(self, scope: Scope, names: Sequence[str]) -> tuple[set[str], int]:
        """Which of these the external tier has, and the generation after that."""
        if self._external is None:
            return set(), await self._current_generation(scope)
        try:
            presence = await self._external.exists(scope, names)
        except (BackendDown, BackendBusy):
            return set(), self._generations.provisional(scope)
        seen = await self._settle(scope, presence.generation)
        return {name for name, found in zip(names, presence.found, strict=True) if found}, seen

    async def _fetch(self, scope: Scope, names: Sequence[str]) -> tuple[list[Value | None], int]:
        """These values from the external tier, and the generation after that."""
        nothing: list[Value | None] = [None] * len(names)
        if self._external is None:
            return nothing, await self._current_generation(scope)
        try:
            got = await self._external.get(scope, names)
        except (BackendDown, BackendBusy):
            return nothing, self._generations.provisional(scope)
        return got.values, await self._settle(scope, got.generation)

    async def _current_generation(self, scope: Scope, *, fresh: bool = False) -> int:
        """The known one, else asked for, else made up until Redis can be asked."""
        known = self._generations.get(scope)
        if known is not None and not fresh:
            return known
        authority = self._external or self._host
        try:
            generation = await authority.ensure_generation(scope, self._generations.proposal(scope))
        except (BackendDown, BackendBusy):
            return self._generations.provisional(scope)
        return self._learn(scope, generation)

    async def _settle(self, scope: Scope, seen: int | None) -> int:
        """Takes in a generation that Redis told, or gives the scope one where Redis has none."""
        return (
            self._learn(scope, seen)
            if seen is not None
            else await self._current_generation(scope, fresh=True)
        )

    def _learn(self, scope: Scope, generation: int) -> int:
        if self._generations.learn(scope, generation):
            self._metrics.generation_changes.inc()
            self._host.clear(scope)
            if self._write_behind is not None:
                self._write_behind.forget(scope, generation)
        return generation

    def _check_generation(self, begun: int, now: int) -> None:
        if begun != now:
            raise GenerationChanged(begun, now)

    def _save_one(
        self, scope: Scope, keyspace: Keyspace, generation: int, key: BlockKey, value: Value
    ) -> bool:
        if not len(value):
            return False
        name = redis_key(keyspace, generation, key)
        in_host = self._host.keep(scope, name, value)
        self._num_saves += 1
        if self._host.capacity_bytes:
            self._metrics.saves.labels("host", "written" if in_host else "dropped").inc()
        if in_host:
            self._metrics.save_bytes.labels("host").inc(len(value))
        queued = self._write_behind is not None and self._write_behind.offer(
            Pending(scope, generation, name, value)
        )
        return in_host or queued

    def _count_lookup(self, num_blocks: int, tiers: Sequence[StoreTier]) -> None:
        self._metrics.lookup_blocks.inc(num_blocks)
        for tier in set(tiers):
            self._metrics.lookup_hits.labels(tier.value).inc(sum(found is tier for found in tiers))

    def _count_load(
        self, loaded: Loaded, values: Sequence[Value | None], fetched: Sequence[Value | None]
    ) -> None:
        self._num_loads += len(values)
        num_missing = len(values) - loaded.num_host - loaded.num_external
        self._metrics.loads.labels("host", "hit").inc(loaded.num_host)
        self._metrics.loads.labels("external", "hit").inc(loaded.num_external)
        self._metrics.loads.labels("external", "miss").inc(num_missing)
        external_bytes = sum(len(value) for value in fetched if value is not None)
        all_bytes = sum(len(value) for value in values if value is not None)
        self._metrics.load_bytes.labels("external").inc(external_bytes)
        self._metrics.load_bytes.labels("host").inc(all_bytes - external_bytes)


def _tiers_of(names: Sequence[Sequence[str]], absent: set[str], found: set[str]) -> list[StoreTier]:
    """Per block where it is, up to the first that lacks a part. `absent` are the keys not in the host."""
    tiers: list[StoreTier] = []
    for parts in names:
        elsewhere = [name for name in parts if name in absent]
        if not all(name in found for name in elsewhere):
            break
        tiers.append(StoreTier.EXTERNAL if elsewhere else StoreTier.HOST)
    return tiers
