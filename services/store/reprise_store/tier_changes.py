"""What each tier has, by keyspace, and who wants to hear of changes.

The tiers tell it (`stored`, `removed`, `at_generation`); a watcher gets what there is now and then every
change. A block counts as in a tier when every rank's part is. What it says of the external tier is a
hint: Redis evicts silently, so a block may be gone that is still listed.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import NamedTuple

from reprise_core.errors import ErrorKind, RepriseError
from reprise_core.ids import BlockHash
from reprise_store.keys import Scope, scope_of
from reprise_wire.block_transfer import Keyspace, parse_redis_key
from reprise_wire.store_codec import StoreTier, TierChange, TierUpdate

MAX_KEYSPACES = 1024
"""Keyspaces followed; past it the one unchanged for longest that nobody watches is forgotten."""
MAX_WATCHED_KEYSPACES = MAX_KEYSPACES // 2
MAX_WATCHERS = 64
CHUNK_BLOCKS = 512
"""Blocks in one message to a watcher, who takes it apart between two steps."""


class TooManyWatchers(RepriseError):
    kind = ErrorKind.EXHAUSTED


class _Name(NamedTuple):
    tier: StoreTier
    group_id: int
    block_hash: BlockHash


class _Tracked:
    """One keyspace: per tier and block the ranks that are there, as bits, oldest first."""

    def __init__(self, tp_size: int) -> None:
        self.whole = (1 << tp_size) - 1
        self.generation: int | None = None
        """Of the blocks; None while none was heard of."""
        self.ranks: dict[StoreTier, OrderedDict[tuple[int, BlockHash], int]] = {}
        self.watches: set[TierWatch] = set()

    def present(self) -> Iterator[_Name]:
        for tier, blocks in self.ranks.items():
            for (group_id, block_hash), ranks in blocks.items():
                if ranks == self.whole:
                    yield _Name(tier, group_id, block_hash)


class TierChanges:
    """Limits: `max_blocks` per keyspace and tier, of which the oldest are forgotten (told as removed);
    `max_pending` changes per watcher, who is told to start over when there are more. Both are counted
    by the callbacks."""

    def __init__(
        self,
        *,
        max_blocks: int = 1_000_000,
        max_pending: int = 65_536,
        on_forgotten: Callable[[], None] = lambda: None,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._max_blocks = max_blocks
        self.max_pending = max_pending
        self._on_forgotten = on_forgotten
        self.on_restart = on_restart
        self._keyspaces: OrderedDict[Keyspace, _Tracked] = OrderedDict()
        self._watches: set[TierWatch] = set()

    @property
    def num_watchers(self) -> int:
        return len(self._watches)

    def stored(self, tier: StoreTier, name: str) -> None:
        """`name` is a block's key (`redis_key`). Idempotent; one of an earlier generation is passed over."""
        keyspace, generation, key = parse_redis_key(name)
        tracked = self._track(keyspace)
        if tracked.generation is None:
            tracked.generation = generation
        if tracked.generation != generation:
            return
        blocks = tracked.ranks.setdefault(tier, OrderedDict())
        block = (key.group_id, key.block_hash)
        before = blocks.pop(block, 0)
        blocks[block] = before | 1 << key.rank
        if before != blocks[block] == tracked.whole:
            self._tell(tracked, _Name(tier, *block), present=True)
        if len(blocks) > self._max_blocks:
            oldest, ranks = blocks.popitem(last=False)
            self._on_forgotten()
            if ranks == tracked.whole:
                self._tell(tracked, _Name(tier, *oldest), present=False)

    def removed(self, tier: StoreTier, name: str) -> None:
        """Idempotent. The block is no longer whole, though other ranks' parts may stay."""
        keyspace, _, key = parse_redis_key(name)
        tracked = self._keyspaces.get(keyspace)
        if tracked is None:
            return
        blocks = tracked.ranks.get(tier, OrderedDict())
        block = (key.group_id, key.block_hash)
        before = blocks.get(block, 0)
        after = before & ~(1 << key.rank)
        if after:
            blocks[block] = after
        else:
            blocks.pop(block, None)
        if before == tracked.whole != after:
            self._tell(tracked, _Name(tier, *block), present=False)

    def at_generation(self, scope: Scope, generation: int) -> None:
        """Another generation than before: every block of the scope is gone from every tier. Idempotent."""
        for keyspace, tracked in self._keyspaces.items():
            if scope_of(keyspace) == scope and tracked.generation != generation:
                tracked.generation = generation
                for name in tracked.present():
                    self._tell(tracked, name, present=False)
                tracked.ranks.clear()

    def watch(self, *keyspaces: Keyspace) -> "TierWatch":
        """All of them as if they were one. Raises TooManyWatchers. The caller closes it."""
        if self.num_watchers >= MAX_WATCHERS:
            raise TooManyWatchers(f"{MAX_WATCHERS} watchers, no more")
        watched = {keyspace for keyspace, tracked in self._keyspaces.items() if tracked.watches}
        if len(watched.union(keyspaces)) > MAX_WATCHED_KEYSPACES:
            raise TooManyWatchers(f"{MAX_WATCHED_KEYSPACES} keyspaces are watched, no more")
        watch = TierWatch(self, [self._track(keyspace) for keyspace in dict.fromkeys(keyspaces)])
        self._watches.add(watch)
        return watch

    def unwatch(self, watch: "TierWatch") -> None:
        self._watches.discard(watch)

    def close(self) -> None:
        """Ends every watch."""
        for watch in list(self._watches):
            watch.close()

    def _track(self, keyspace: Keyspace) -> _Tracked:
        tracked = self._keyspaces.get(keyspace)
        if tracked is None:
            self._make_room()
            tracked = self._keyspaces[keyspace] = _Tracked(keyspace.tp_size)
        self._keyspaces.move_to_end(keyspace)
        return tracked

    def _make_room(self) -> None:
        if len(self._keyspaces) < MAX_KEYSPACES:
            return
        forgotten = next(key for key, tracked in self._keyspaces.items() if not tracked.watches)
        del self._keyspaces[forgotten]

    def _tell(self, tracked: _Tracked, name: _Name, *, present: bool) -> None:
        for watch in tracked.watches:
            watch.offer(name, present)


class TierWatch:
    """One watcher: a snapshot, then changes, of which only the last per block is kept (so one that came and
    went is told as gone only)."""

    def __init__(self, changes: TierChanges, tracked: Sequence[_Tracked]) -> None:
        self._changes = changes
        self._tracked = tracked
        for keyspace in tracked:
            keyspace.watches.add(self)
        self._pending: OrderedDict[_Name, bool] = OrderedDict()
        self._starts_over = True
        self._closed = False
        self._arrived = asyncio.Event()
        self._arrived.set()

    def offer(self, name: _Name, present: bool) -> None:
        if self._starts_over:
            return  # the snapshot to come has it
        self._pending.pop(name, None)
        self._pending[name] = present
        self._arrived.set()
        if len(self._pending) > self._changes.max_pending:
            self._pending.clear()
            self._starts_over = True
            self._changes.on_restart()

    def close(self) -> None:
        self._closed = True
        self._arrived.set()
        for keyspace in self._tracked:
            keyspace.watches.discard(self)
        self._changes.unwatch(self)

    async def updates(self) -> AsyncIterator[TierUpdate]:
        """Until closed. An update with `start` makes everything said before void."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            start = self._starts_over
            self._starts_over = False
            changes = self._snapshot() if start else self._take_pending()
            while not self._closed and (start or changes):
                yield TierUpdate(start=start, changes=tuple(changes[:CHUNK_BLOCKS]))
                changes = [] if self._starts_over else changes[CHUNK_BLOCKS:]
                start = False
            if self._closed:
                return

    def _snapshot(self) -> list[TierChange]:
        return [TierChange(*name, present=True) for keyspace in self._tracked for name in keyspace.present()]

    def _take_pending(self) -> list[TierChange]:
        taken = [TierChange(*name, present=present) for name, present in self._pending.items()]
        self._pending.clear()
        return taken
