"""The store itself: host memory and disk in front of an external tier, one generation per model.

Every answer is true for a generation: it is read from Redis after the blocks, in the same round trip.
While Redis is away the last known one holds, because a reset needs Redis to be there.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from reprise_core.errors import RepriseError
from reprise_core.ids import BlockHash
from reprise_runtime.logs import get_logger
from reprise_store.external_tier import ExternalTier
from reprise_store.generations import Generations
from reprise_store.keys import Scope, scope_of
from reprise_store.memory_backend import MemoryBackend
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import BackendBusy, BackendDown, Disk, Value
from reprise_store.tier_changes import TierChanges
from reprise_store.write_behind import Pending, WriteBehind
from reprise_wire.block_transfer import BlockKey, Keyspace, parse_redis_key, redis_keys
from reprise_wire.store_codec import StoreLookup, StoreStats, StoreTier

MAX_GENERATION_RACES = 3
"""Look-ups started over because a reset came between; then the answer is "nothing found"."""
MAX_SWEEPS_WAITING = 256
"""Scopes whose old blocks wait to be deleted; beyond it they are left to expiry and eviction."""


Land = Callable[[Sequence[Value | None]], Awaitable[list[Value | None]]]


class GenerationChanged(RepriseError):
    """The transfer began before a reset."""

    def __init__(self, begun: int, now: int) -> None:
        super().__init__(f"began with generation {begun}, now {now}")


@dataclass(frozen=True, slots=True)
class Loaded:
    values: list[Value | None]
    tiers: list[StoreTier | None]
    """Where each was found."""


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
        changes: TierChanges | None = None,
        disk: Disk | None = None,
    ) -> None:
        self._host = host
        self._disk = disk
        self._external = external
        self._write_behind = write_behind
        self._generations = generations
        self._lookup_chunk_keys = lookup_chunk_keys
        self._metrics = metrics
        self._changes = changes
        self._sweeps: deque[Scope] = deque(maxlen=MAX_SWEEPS_WAITING)
        self._num_loads = 0
        self._num_saves = 0
        self._log = get_logger()
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
        names = redis_keys(keyspace, generation, [key for key, _ in items])
        values = [value for _, value in items]
        in_host = [
            bool(len(value)) and self._host.keep(scope, name, value)
            for name, value in zip(names, values, strict=True)
        ]
        self._count_saves(values, in_host)
        return [
            bool(len(value)) and (self._offer_below(scope, generation, name, value) or kept)
            for name, value, kept in zip(names, values, in_host, strict=True)
        ]

    async def load(
        self, keyspace: Keyspace, generation: int, keys: Sequence[BlockKey], land: Land | None = None
    ) -> Loaded:
        """Values in the keys' order, None where no tier has one (or Redis cannot be asked).

        `land` moves what comes from elsewhere to where the asker can read it and the host tier keeps it.
        Books are kept in the next turn of the event loop, for the asker to have its answer first.
        """
        scope = scope_of(keyspace)
        names = redis_keys(keyspace, generation, keys)
        values = [self._host.take(name) for name in names]
        tiers: list[StoreTier | None] = [None if value is None else StoreTier.HOST for value in values]
        missing = [index for index, value in enumerate(values) if value is None]
        fetched, now = await self._fetch_below(scope, [names[index] for index in missing])
        self._check_generation(generation, now)
        landed = [value for value, _ in fetched]
        if land is not None and missing:
            landed = await land(landed)
            self._check_generation(generation, self._generations.get(scope) or now)
        for index, value, (_, tier) in zip(missing, landed, fetched, strict=True):
            values[index], tiers[index] = value, tier
        loaded = Loaded(values, tiers)
        asyncio.get_running_loop().call_soon(
            self._was_loaded, scope, generation, loaded, missing, [names[index] for index in missing]
        )
        return loaded

    def _was_loaded(
        self, scope: Scope, generation: int, loaded: Loaded, missing: Sequence[int], names: Sequence[str]
    ) -> None:
        """`missing`: what was not in host memory, and its names."""
        self._count_load(loaded)
        if self._generations.get(scope) != generation:
            return
        for index, name in zip(missing, names, strict=True):
            value, tier = loaded.values[index], loaded.tiers[index]
            if value is None:
                continue
            self._host.keep(scope, name, value)
            if tier is StoreTier.EXTERNAL and self._disk is not None:
                self._disk.offer(scope, name, value)

    def was_read(self, keyspace: Keyspace, generation: int, keys: Sequence[BlockKey]) -> None:
        """A worker has taken these from the host tier by itself."""
        values = [self._host.take(name) for name in redis_keys(keyspace, generation, keys)]
        found = [value for value in values if value is not None]
        self._count_load(Loaded([*found], [StoreTier.HOST] * len(found)))

    def evict(self, keyspace: Keyspace, block_hashes: Set[BlockHash], tiers: Set[StoreTier]) -> int:
        """Frees this store's copies of these blocks (all of the keyspace's, if none is named) in host memory
        and on disk; how many went. Redis keeps its own."""
        scope, num_evicted = scope_of(keyspace), 0
        for tier, place in ((StoreTier.HOST, self._host), (StoreTier.DISK, self._disk)):
            if tier not in tiers or place is None:
                continue
            for name in place.names(scope):
                owner, _, key = parse_redis_key(name)
                if owner == keyspace and (not block_hashes or key.block_hash in block_hashes):
                    place.drop(name)
                    num_evicted += 1
        self.show()
        return num_evicted

    async def reset(self, keyspace: Keyspace) -> int:
        """The new generation. Raises BackendDown when Redis is configured and did not take it: then the
        blocks are all still there, in every tier."""
        scope = scope_of(keyspace)
        try:
            generation = await self._authority.advance_generation(scope, self._generations.proposal(scope))
        except RepriseError:
            self._metrics.resets.labels("failed").inc()
            raise
        self._learn(scope, generation)
        if self._external is not None and scope not in self._sweeps:
            self._sweeps.append(scope)
        self._metrics.resets.labels("done").inc()
        self.show()
        return generation

    async def settle_generation(self, scope: Scope) -> None:
        """Asks Redis for it and drops what is of another one. Raises BackendDown or BackendBusy."""
        assert self._external is not None
        seen = (await self._external.exists(scope, [])).generation
        if seen is not None:
            self._learn(scope, seen)
        else:
            await self._ask_generation(scope)  # a write, which a full server refuses

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
            disk_bytes=self._disk.num_bytes if self._disk else 0,
            disk_capacity_bytes=self._disk.capacity_bytes if self._disk else 0,
            disk_blocks=self._disk.num_blocks if self._disk else 0,
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
            keys = [BlockKey(rank, group_id, block) for block in chunk for rank, group_id in parts]
            flat = redis_keys(keyspace, generation, keys)
            names = [flat[first : first + len(parts)] for first in range(0, len(flat), len(parts))]
            where = {name: self._local_tier(name) for name in flat}
            absent = [name for name, tier in where.items() if tier is None]
            found, seen = await self._find(scope, absent)
            where.update(dict.fromkeys(found, StoreTier.EXTERNAL))
            chunk_tiers = _tiers_of(names, where)
            tiers += chunk_tiers
            if seen != generation or len(chunk_tiers) < len(chunk):
                break
        return tiers, seen

    def _local_tier(self, name: str) -> StoreTier | None:
        if self._host.has(name):
            return StoreTier.HOST
        return StoreTier.DISK if self._disk is not None and self._disk.has(name) else None

    async def _fetch_below(
        self, scope: Scope, names: Sequence[str]
    ) -> tuple[list[tuple[Value | None, StoreTier | None]], int]:
        """These values from the tiers below the host with where each was, and the generation after that."""
        on_disk = await self._disk.read(names) if self._disk is not None else [None] * len(names)
        rest = [index for index, value in enumerate(on_disk) if value is None]
        fetched: list[tuple[Value | None, StoreTier | None]] = [(value, StoreTier.DISK) for value in on_disk]
        values, now = await self._fetch(scope, [names[index] for index in rest])
        for index, value in zip(rest, values, strict=True):
            fetched[index] = (value, None if value is None else StoreTier.EXTERNAL)
        return fetched, now

    @property
    def _authority(self) -> ExternalTier | Disk | MemoryBackend:
        """Who keeps the generations: the tier that lives longest and is shared most."""
        return self._external or self._disk or self._host

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
        if self._changes is not None:
            asyncio.get_running_loop().call_soon(_tell_external, self._changes, names, got.values)
        return got.values, await self._settle(scope, got.generation)

    async def _current_generation(self, scope: Scope, *, fresh: bool = False) -> int:
        """The known one, else asked for, else made up until Redis can be asked."""
        known = self._generations.get(scope)
        if known is not None and not fresh:
            return known
        try:
            return await self._ask_generation(scope)
        except (BackendDown, BackendBusy):
            return self._generations.provisional(scope)

    async def _ask_generation(self, scope: Scope) -> int:
        before, proposal = self._generations.get(scope), self._generations.proposal(scope)
        generation = await self._authority.ensure_generation(scope, proposal)
        if generation == proposal and before not in (None, proposal):
            self._log.warning(
                "a generation was lost; all blocks of its model are useless",
                namespace=scope.namespace,
                fingerprint=scope.fingerprint,
                advice="unless redis was emptied: see its maxmemory-policy",
            )
        return self._learn(scope, generation)

    async def _settle(self, scope: Scope, seen: int | None) -> int:
        """Takes in a generation that Redis told, or gives the scope one where Redis has none."""
        return (
            self._learn(scope, seen)
            if seen is not None
            else await self._current_generation(scope, fresh=True)
        )

    def _learn(self, scope: Scope, generation: int) -> int:
        if self._changes is not None:
            self._changes.at_generation(scope, generation)
        is_news = self._generations.get(scope) != generation
        if self._generations.learn(scope, generation):
            self._metrics.generation_changes.inc()
            self._host.clear(scope)
            if self._write_behind is not None:
                self._write_behind.forget(scope, generation)
        if is_news and self._disk is not None:
            self._disk.at_generation(scope, generation)
        return generation

    def _check_generation(self, begun: int, now: int) -> None:
        if begun != now:
            raise GenerationChanged(begun, now)

    def _offer_below(self, scope: Scope, generation: int, name: str, value: Value) -> bool:
        """Whether disk or Redis will get it."""
        on_disk = self._disk is not None and self._disk.offer(scope, name, value)
        queued = self._write_behind is not None and self._write_behind.offer(
            Pending(scope, generation, name, value)
        )
        return on_disk or queued

    def _count_saves(self, values: Sequence[Value], in_host: Sequence[bool]) -> None:
        num_saves, num_kept = sum(len(value) > 0 for value in values), sum(in_host)
        self._num_saves += num_saves
        if self._host.capacity_bytes:
            num_bytes = sum(len(value) for value, kept in zip(values, in_host, strict=True) if kept)
            self._metrics.saves.labels("host", "written").inc(num_kept)
            self._metrics.saves.labels("host", "dropped").inc(num_saves - num_kept)
            self._metrics.save_bytes.labels("host").inc(num_bytes)

    def _count_lookup(self, num_blocks: int, tiers: Sequence[StoreTier]) -> None:
        self._metrics.lookup_blocks.inc(num_blocks)
        for tier in set(tiers):
            self._metrics.lookup_hits.labels(tier.value).inc(sum(found is tier for found in tiers))

    def _count_load(self, loaded: Loaded) -> None:
        self._num_loads += len(loaded.values)
        for tier in StoreTier:
            sizes = [
                len(value)
                for value, found in zip(loaded.values, loaded.tiers, strict=True)
                if value is not None and found is tier
            ]
            if sizes:
                self._metrics.loads.labels(tier.value, "hit").inc(len(sizes))
                self._metrics.load_bytes.labels(tier.value).inc(sum(sizes))
        num_missing = loaded.tiers.count(None)
        if num_missing:
            self._metrics.loads.labels("external", "miss").inc(num_missing)


def _tell_external(changes: TierChanges, names: Sequence[str], values: Sequence[Value | None]) -> None:
    for name, value in zip(names, values, strict=True):
        tell = changes.removed if value is None else changes.stored
        tell(StoreTier.EXTERNAL, name)


_SPEED = (StoreTier.HOST, StoreTier.DISK, StoreTier.EXTERNAL)


def _tiers_of(names: Sequence[Sequence[str]], where: Mapping[str, StoreTier | None]) -> list[StoreTier]:
    """Per block the slowest tier that a part of it is in, up to the first that lacks a part."""
    tiers: list[StoreTier] = []
    for parts in names:
        found = [tier for name in parts if (tier := where[name]) is not None]
        if len(found) < len(parts):
            break
        tiers.append(found[0] if len(found) == 1 else max(found, key=_SPEED.index))
    return tiers
