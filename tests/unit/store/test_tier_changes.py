"""What watchers of tiers hear: only whole blocks, all of it, and in a bounded queue."""

import asyncio

import pytest

from reprise_core.ids import BlockHash
from reprise_store.keys import Scope, scope_of
from reprise_store.memory_backend import MemoryBackend
from reprise_store.tier_changes import (
    CHUNK_BLOCKS,
    MAX_KEYSPACES,
    MAX_WATCHED_KEYSPACES,
    MAX_WATCHERS,
    TierChanges,
    TierWatch,
    TooManyWatchers,
)
from reprise_wire.block_transfer import BlockKey, Keyspace, parse_redis_key, redis_key
from reprise_wire.store_codec import (
    StoreTier,
    TierChange,
    TierUpdate,
    tier_update_from_proto,
    tier_update_to_proto,
)

KEYSPACE = Keyspace("test", "ab" * 16)
TWO_RANKS = Keyspace("test", "cd" * 16, "", 2)
GENERATION = 7


def digest(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def name(number: int, *, keyspace: Keyspace = KEYSPACE, rank: int = 0, generation: int = GENERATION) -> str:
    return redis_key(keyspace, generation, BlockKey(rank, 0, digest(number)))


def host(number: int, present: bool = True) -> TierChange:
    return TierChange(StoreTier.HOST, 0, digest(number), present)


class Follower:
    """Replays updates: what a watcher believes."""

    def __init__(self, watch: TierWatch) -> None:
        self.updates = watch.updates()
        self.present: set[TierChange] = set()
        self.num_starts = 0

    async def read(self) -> TierUpdate:
        update = await asyncio.wait_for(anext(self.updates), 5)
        if update.start:
            self.num_starts += 1
            self.present.clear()
        for change in update.changes:
            block = TierChange(change.tier, change.group_id, change.block_hash, True)
            if change.present:
                self.present.add(block)
            else:
                self.present.discard(block)
        return update


@pytest.mark.parametrize("adapter", ["", "ab" * 8])
def test_a_key_can_be_taken_apart_again(adapter: str) -> None:
    keyspace, key = Keyspace("a.b-c_1", "ef" * 16, adapter, 4), BlockKey(3, 2, digest(2**200))
    assert parse_redis_key(redis_key(keyspace, 2**48, key)) == (keyspace, 2**48, key)


def test_an_update_survives_the_wire_in_its_order() -> None:
    changes = (host(1), host(2), host(1, False), TierChange(StoreTier.EXTERNAL, 3, digest(1), True))
    update = TierUpdate(changes, start=True)
    message = tier_update_to_proto(update)
    assert len(message.changes) == 3  # runs of one kind
    assert tier_update_from_proto(message) == update


async def test_a_watcher_gets_what_there_is_and_then_every_change() -> None:
    changes = TierChanges()
    backend = MemoryBackend(100, changes=changes)
    scope = scope_of(KEYSPACE)
    backend.keep(scope, name(1), b"x" * 40)
    backend.keep(scope, name(2), b"x" * 40)
    follower = Follower(changes.watch(KEYSPACE))
    assert await follower.read() == TierUpdate((host(1), host(2)), start=True)
    backend.keep(scope, name(3), b"x" * 40)  # makes room: 1 goes
    assert await follower.read() == TierUpdate((host(1, False), host(3)))
    backend.keep(scope, name(3), b"y" * 40)  # replaced: still there
    backend.clear(scope)
    await follower.read()
    assert follower.present == set()


async def test_a_block_is_told_when_every_rank_has_it_and_no_longer_when_one_lacks_it() -> None:
    changes = TierChanges()
    follower = Follower(changes.watch(TWO_RANKS))
    assert await follower.read() == TierUpdate((), start=True)
    changes.stored(StoreTier.HOST, name(1, keyspace=TWO_RANKS, rank=0))
    changes.stored(StoreTier.HOST, name(2, keyspace=TWO_RANKS, rank=1))
    changes.stored(StoreTier.HOST, name(2, keyspace=TWO_RANKS, rank=0))
    assert await follower.read() == TierUpdate((host(2),))
    changes.removed(StoreTier.HOST, name(1, keyspace=TWO_RANKS, rank=0))
    changes.removed(StoreTier.HOST, name(2, keyspace=TWO_RANKS, rank=1))
    assert await follower.read() == TierUpdate((host(2, False),))


async def test_another_keyspace_and_another_tier_are_told_apart() -> None:
    changes = TierChanges()
    follower = Follower(changes.watch(KEYSPACE))
    await follower.read()
    changes.stored(StoreTier.HOST, name(1, keyspace=Keyspace("test", "ab" * 16, "ab" * 8)))
    changes.stored(StoreTier.HOST, name(2))
    changes.stored(StoreTier.EXTERNAL, name(2))
    changes.removed(StoreTier.HOST, name(2))
    await follower.read()
    assert follower.present == {TierChange(StoreTier.EXTERNAL, 0, digest(2), True)}


async def test_a_reset_takes_everything_and_late_writes_of_before_are_not_told() -> None:
    changes = TierChanges()
    follower = Follower(changes.watch(KEYSPACE))
    for tier in (StoreTier.HOST, StoreTier.EXTERNAL):
        changes.stored(tier, name(1))
    await follower.read()
    assert len(follower.present) == 2
    changes.at_generation(Scope("other", "ab" * 16), 99)
    changes.at_generation(scope_of(KEYSPACE), GENERATION)  # the one it has: nothing happens
    changes.at_generation(scope_of(KEYSPACE), GENERATION + 1)
    changes.stored(StoreTier.EXTERNAL, name(2))  # its write was under way
    changes.stored(StoreTier.HOST, name(3, generation=GENERATION + 1))
    await follower.read()
    assert follower.present == {host(3)}


async def test_a_watcher_that_falls_behind_starts_over_and_ends_up_right() -> None:
    restarts: list[int] = []
    changes = TierChanges(max_pending=10, on_restart=lambda: restarts.append(1))
    follower = Follower(changes.watch(KEYSPACE))
    await follower.read()
    for number in range(30):
        changes.stored(StoreTier.HOST, name(number))
    changes.removed(StoreTier.HOST, name(3))
    await follower.read()
    assert follower.num_starts == 2
    assert follower.present == {host(number) for number in range(30) if number != 3}
    assert len(restarts) == 1


async def test_a_snapshot_of_many_blocks_comes_in_chunks_with_changes_in_between() -> None:
    changes = TierChanges()
    last = 2 * CHUNK_BLOCKS
    for number in range(last):
        changes.stored(StoreTier.HOST, name(number))
    follower = Follower(changes.watch(KEYSPACE))
    first = await follower.read()
    assert first.start
    assert len(first.changes) == CHUNK_BLOCKS
    changes.removed(StoreTier.HOST, name(last - 1))
    changes.stored(StoreTier.HOST, name(last))
    for _ in range(2):
        assert not (await follower.read()).start
    assert follower.present == {host(number) for number in range(last + 1) if number != last - 1}


async def test_no_more_blocks_are_followed_than_the_limit() -> None:
    forgotten: list[int] = []
    changes = TierChanges(max_blocks=3, on_forgotten=lambda: forgotten.append(1))
    follower = Follower(changes.watch(KEYSPACE))
    for number in range(5):
        changes.stored(StoreTier.EXTERNAL, name(number))
    await follower.read()
    assert {change.block_hash for change in follower.present} == {digest(2), digest(3), digest(4)}
    assert len(forgotten) == 2


async def test_watchers_and_keyspaces_are_limited_and_watched_keyspaces_stay() -> None:
    changes = TierChanges()
    watches = [changes.watch(KEYSPACE) for _ in range(MAX_WATCHERS)]
    with pytest.raises(TooManyWatchers):
        changes.watch(KEYSPACE)
    for number in range(MAX_KEYSPACES + 5):
        other = Keyspace("test", f"{number:032x}")
        changes.stored(StoreTier.HOST, name(1, keyspace=other))
    changes.stored(StoreTier.HOST, name(1))
    follower = Follower(watches[0])
    await follower.read()
    assert follower.present == {host(1)}


async def test_one_watch_of_several_keyspaces_hears_of_all_and_of_no_other() -> None:
    """A model's and its adapters': what was there before, what comes, and a reset of them all."""
    changes = TierChanges()
    adapters = [Keyspace(KEYSPACE.namespace, KEYSPACE.fingerprint, letter * 16) for letter in "abc"]
    changes.stored(StoreTier.HOST, name(1, keyspace=adapters[0]))
    watch = changes.watch(KEYSPACE, *adapters[:2], adapters[0])
    assert changes.num_watchers == 1
    follower = Follower(watch)
    await follower.read()
    assert follower.present == {host(1)}
    changes.stored(StoreTier.HOST, name(2))
    changes.stored(StoreTier.HOST, name(3, keyspace=adapters[1]))
    changes.stored(StoreTier.HOST, name(4, keyspace=adapters[2]))
    await follower.read()
    assert follower.present == {host(1), host(2), host(3)}
    changes.at_generation(scope_of(KEYSPACE), 99)
    await follower.read()
    assert follower.present == set()
    watch.close()
    assert changes.num_watchers == 0
    changes.stored(StoreTier.HOST, name(5))


async def test_watched_keyspaces_are_limited_so_that_others_can_be_forgotten() -> None:
    changes = TierChanges()
    keyspaces = [Keyspace("test", f"{number:032x}") for number in range(MAX_WATCHED_KEYSPACES)]
    changes.watch(*keyspaces)
    with pytest.raises(TooManyWatchers, match="512 keyspaces"):
        changes.watch(Keyspace("other", "0" * 32))
    changes.watch(*keyspaces[:3])
    for number in range(MAX_KEYSPACES + 5):
        changes.stored(StoreTier.HOST, name(1, keyspace=Keyspace("more", f"{number:032x}")))


async def test_closing_ends_every_watch() -> None:
    changes = TierChanges()
    follower = Follower(changes.watch(KEYSPACE))
    await follower.read()
    waiting = asyncio.ensure_future(anext(follower.updates, None))
    await asyncio.sleep(0)
    changes.close()
    assert await asyncio.wait_for(waiting, 5) is None
    assert changes.num_watchers == 0
