"""The disk tier of the store, on a real folder."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from reprise_core.errors import FailedPrecondition
from reprise_core.ids import BlockHash
from reprise_store.adapters.disk_tier import DiskTier
from reprise_store.keys import Scope, scope_of
from reprise_store.metrics import StoreMetrics
from reprise_store.tier_changes import TierChanges
from reprise_wire.block_transfer import BlockKey, Keyspace, redis_key
from reprise_wire.store_codec import StoreTier
from support.waiting import until

KEYSPACE = Keyspace("..", "ab" * 16, adapter="0123456789abcdef")
OTHER = Keyspace("..", "cd" * 16)
SCOPE = scope_of(KEYSPACE)


def name(number: int, generation: int = 5, keyspace: Keyspace = KEYSPACE) -> str:
    return redis_key(keyspace, generation, BlockKey(0, 3, BlockHash(number.to_bytes(32, "big"))))


class Told(TierChanges):
    """What the tier said is there."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def stored(self, tier: StoreTier, name: str) -> None:
        assert tier is StoreTier.DISK
        self.names.add(name)

    def removed(self, tier: StoreTier, name: str) -> None:
        assert tier is StoreTier.DISK
        self.names.discard(name)


class Watched:
    """A running tier, its metrics, and what it told of."""

    def __init__(self, folder: Path, *, capacity_bytes: int = 1 << 20, queue_bytes: int = 1 << 20) -> None:
        self.registry = CollectorRegistry()
        self.changes = Told()
        self.num_offered = 0
        self.tier = DiskTier(
            folder,
            capacity_bytes=capacity_bytes,
            queue_bytes=queue_bytes,
            metrics=StoreMetrics(self.registry),
            changes=self.changes,
        )

    def count(self, metric: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"reprise_store_{metric}", labels) or 0.0

    def offer(self, scope: Scope, key: str, value: bytes) -> bool:
        self.num_offered += 1
        return self.tier.offer(scope, key, value)

    async def keep(self, scope: Scope, key: str, value: bytes) -> None:
        assert self.offer(scope, key, value)
        await self.settled()

    async def settled(self) -> None:
        """Everything that was offered is written or dropped."""
        await until(
            lambda: (
                self.num_offered
                == sum(self.count("saves_total", tier="disk", outcome=how) for how in ("written", "dropped"))
            )
        )


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


@asynccontextmanager
async def running(watched: Watched) -> AsyncIterator[Watched]:
    watched.tier.open()
    writer = asyncio.create_task(watched.tier.write_forever())
    try:
        yield watched
    finally:
        writer.cancel()
        watched.tier.close()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Watched]:
    return lambda **limits: Watched(tmp_path / "tier", **limits)


async def test_what_is_kept_comes_back_whole_also_after_a_restart(make: Callable[..., Watched]) -> None:
    async with running(make()) as first:
        for i in range(20):
            await first.keep(SCOPE, name(i), bytes([i]) * (100 + i))
        await first.keep(SCOPE, name(7), b"mended")
    async with running(make()) as second:
        assert second.tier.num_blocks == 20
        assert not second.changes.names
        second.tier.at_generation(SCOPE, 5)
        assert second.changes.names == {name(i) for i in range(20)}
        values = await second.tier.read([name(3), name(7), name(99)])
        assert values == [bytes([3]) * 103, b"mended", None]
        assert await second.tier.read([]) == []


async def test_the_least_recently_used_leave_first(make: Callable[..., Watched], tmp_path: Path) -> None:
    async with running(make(capacity_bytes=10_000)) as watched:
        for i in range(10):
            await watched.keep(SCOPE, name(i), bytes(1000))
        await watched.tier.read([name(0)])
        await watched.keep(SCOPE, name(10), bytes(2000))
        assert [i for i in range(11) if watched.tier.has(name(i))] == [0, 3, 4, 5, 6, 7, 8, 9, 10]
        assert watched.tier.num_bytes == 10_000
        assert watched.count("disk_evictions_total") == 2
        assert watched.changes.names == {name(i) for i in (0, 3, 4, 5, 6, 7, 8, 9, 10)}
        assert sum(path.stat().st_size for path in files_in(tmp_path)) == 10_000


async def test_a_smaller_capacity_holds_at_the_next_start(make: Callable[..., Watched]) -> None:
    async with running(make()) as first:
        for i in range(10):
            await first.keep(SCOPE, name(i), bytes(1000))
    async with running(make(capacity_bytes=3500)) as second:
        assert second.tier.num_bytes == 3000


async def test_a_full_queue_drops_and_counts(make: Callable[..., Watched]) -> None:
    watched = make(queue_bytes=2500)
    watched.tier.open()
    assert [watched.offer(SCOPE, name(i), bytes(1000)) for i in range(4)] == [True, True, False, False]
    assert watched.count("disk_dropped_total", reason="queue_full") == 2
    watched.tier.close()


async def test_another_generation_forgets_one_scope_and_what_waits_for_it(
    make: Callable[..., Watched],
) -> None:
    async with running(make()) as watched:
        await watched.keep(SCOPE, name(1), b"mine")
        await watched.keep(scope_of(OTHER), name(1, keyspace=OTHER), b"other")
        watched.offer(SCOPE, name(2), b"waiting")
        watched.tier.at_generation(SCOPE, 6)
        assert watched.changes.names == {name(1, keyspace=OTHER)}
        await watched.keep(scope_of(OTHER), name(2, keyspace=OTHER), b"later")
        assert not watched.tier.has(name(2))
        assert await watched.tier.read([name(1), name(1, keyspace=OTHER)]) == [None, b"other"]


async def test_generations_outlive_the_process(make: Callable[..., Watched]) -> None:
    async with running(make()) as first:
        assert await first.tier.ensure_generation(SCOPE, 40) == 40
        assert await first.tier.ensure_generation(SCOPE, 90) == 40
        assert await first.tier.advance_generation(SCOPE, 90) == 41
    async with running(make()) as second:
        assert await second.tier.ensure_generation(SCOPE, 7) == 41
        assert await second.tier.advance_generation(scope_of(OTHER), 7) == 8


async def test_a_file_that_is_gone_is_a_miss(make: Callable[..., Watched], tmp_path: Path) -> None:
    async with running(make()) as watched:
        await watched.keep(SCOPE, name(1), b"value")
        (path,) = files_in(tmp_path)
        path.unlink()
        assert await watched.tier.read([name(1)]) == [None]
        assert watched.count("disk_read_failures_total") == 1
        assert not watched.tier.has(name(1))


async def test_half_written_files_of_a_killed_store_are_removed(
    make: Callable[..., Watched], tmp_path: Path
) -> None:
    async with running(make()) as first:
        await first.keep(SCOPE, name(1), b"value")
    (path,) = files_in(tmp_path)
    (path.parent / (path.name[:-1] + "f.partial")).write_bytes(b"half")
    (path.parent / (path.name[:-1] + "e")).write_bytes(b"")
    async with running(make()) as second:
        assert second.tier.num_blocks == 1
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


async def test_a_disk_that_refuses_is_left_alone_for_a_while(
    make: Callable[..., Watched], tmp_path: Path
) -> None:
    async with running(make()) as watched:
        # A file where the namespace's folder belongs: nothing can be written below it, also by root.
        (tmp_path / "tier" / "ns-..").write_bytes(b"")
        assert watched.offer(SCOPE, name(1), b"value")
        await until(lambda: watched.count("disk_dropped_total", reason="io_error") == 1)
        assert watched.offer(SCOPE, name(2), b"value")
        await until(lambda: watched.count("disk_dropped_total", reason="unavailable") == 1)
        assert watched.tier.num_blocks == 0


async def test_two_stores_never_share_a_folder(make: Callable[..., Watched]) -> None:
    async with running(make()):
        with pytest.raises(FailedPrecondition, match="in use by another store"):
            make().tier.open()


async def test_a_random_history_keeps_the_books(make: Callable[..., Watched]) -> None:
    seed = int(os.environ.get("REPRISE_TEST_SEED", random.randrange(2**32)))
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with running(make(capacity_bytes=20_000)) as watched:
        written: dict[str, set[bytes]] = {}
        for _ in range(300):
            key = name(rng.randrange(40))
            match rng.randrange(6):
                case 0:
                    watched.tier.drop(key)
                case 1:
                    (value,) = await watched.tier.read([key])
                    assert value is None or value in written[key]
                case _:
                    value = rng.randbytes(rng.randrange(1, 2000))
                    written.setdefault(key, set()).add(value)
                    watched.offer(SCOPE, key, value)
                    if rng.random() < 0.5:
                        await watched.settled()
        await watched.settled()
        assert watched.tier.num_bytes <= 20_000
        held = {key for key in written if watched.tier.has(key)}
        assert watched.changes.names == held
        values = await watched.tier.read(sorted(held))
        assert watched.tier.num_bytes == sum(len(value) for value in values if value is not None)
