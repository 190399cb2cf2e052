"""A whole store whose middle tier is a folder: alone, beside host memory, and in front of a real Valkey."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from reprise_core.errors import RepriseError
from reprise_wire.block_transfer import Keyspace, TransferKind
from reprise_wire.store_codec import StoreTier
from support.store_harness import (
    KEYSPACE,
    RunningStore,
    Way,
    block_hashes,
    keys_of,
    running_store,
)
from support.valkey_server import ValkeyProcess
from support.waiting import until

OTHER = Keyspace("test", "cd" * 16)
HASHES = block_hashes(12)
KEYS = keys_of(HASHES)
VALUES = [bytes([i]) * 3000 for i in range(12)]


@pytest.fixture(params=["frames", "shared memory"], autouse=True)
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    Way.shares_memory = request.param == "shared memory"
    yield
    Way.shares_memory = False


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyProcess]:
    server = ValkeyProcess(tmp_path).start()
    yield server
    server.kill()


async def fill(store: RunningStore, keyspace: Keyspace = KEYSPACE) -> int:
    """Saves all blocks and waits until they are on disk; their generation."""
    before = store.metric("disk_blocks")
    generation = (await store.client.lookup(keyspace, [0], ())).generation
    saved = await store.peer.save(generation, KEYS, VALUES, keyspace)
    assert all(saved.accepted)
    await until(lambda: store.metric("disk_blocks") == before + len(KEYS))
    return generation


async def test_blocks_outlive_a_store_without_redis(tmp_path: Path) -> None:
    async with running_store(disk_folder=str(tmp_path)) as first:
        generation = await fill(first)
    async with running_store(disk_folder=str(tmp_path)) as second:
        found = await second.client.lookup(KEYSPACE, [0], HASHES)
        assert found.generation == generation
        assert found.tiers == (StoreTier.DISK,) * 12
        _, values = await second.peer.load(generation, KEYS)
        assert values == VALUES
        # What was read is in host memory now.
        assert (await second.client.lookup(KEYSPACE, [0], HASHES)).tiers == (StoreTier.HOST,) * 12
        assert second.metric("loads_total", tier="disk", outcome="hit") == 12
        assert second.metric("load_bytes_total", tier="disk") == 36_000


async def test_what_host_memory_lost_is_served_from_disk(tmp_path: Path) -> None:
    async with running_store(disk_folder=str(tmp_path), capacity_bytes=10_000) as store:
        generation = await fill(store)
        tiers = (await store.client.lookup(KEYSPACE, [0], HASHES)).tiers
        assert tiers == (StoreTier.DISK,) * 9 + (StoreTier.HOST,) * 3
        _, values = await store.peer.load(generation, KEYS)
        assert values == VALUES
        stats = await store.client.stats()
        assert (stats.host_blocks, stats.disk_blocks, stats.disk_bytes) == (3, 12, 36_000)


async def test_a_reset_clears_the_disk_and_leaves_other_models_alone(tmp_path: Path) -> None:
    async with running_store(disk_folder=str(tmp_path), capacity_bytes=0) as store:
        generation = await fill(store)
        other = await fill(store, OTHER)
        assert await store.client.reset(KEYSPACE) == generation + 1
        assert (await store.client.lookup(KEYSPACE, [0], HASHES)).tiers == ()
        assert (await store.client.lookup(OTHER, [0], HASHES)).tiers == (StoreTier.DISK,) * 12
        refused, _ = await store.peer.load(generation, KEYS)
        assert (refused.kind, refused.reason) == (TransferKind.REFUSED, "generation")
    async with running_store(disk_folder=str(tmp_path), capacity_bytes=0) as later:
        found = await later.client.lookup(KEYSPACE, [0], HASHES)
        assert (found.generation, found.tiers) == (generation + 1, ())
        _, values = await later.peer.load(other, KEYS, OTHER)
        assert values == VALUES


async def test_eviction_on_demand_by_tier_and_hash(tmp_path: Path) -> None:
    async with running_store(disk_folder=str(tmp_path)) as store:
        await fill(store)
        assert await store.client.evict(KEYSPACE, HASHES[:4], [StoreTier.HOST]) == 4
        tiers = (await store.client.lookup(KEYSPACE, [0], HASHES)).tiers
        assert tiers == (StoreTier.DISK,) * 4 + (StoreTier.HOST,) * 8
        assert await store.client.evict(OTHER) == 0
        assert await store.client.evict(KEYSPACE, tiers=[StoreTier.DISK]) == 12
        assert await store.client.evict(KEYSPACE) == 8
        assert (await store.client.lookup(KEYSPACE, [0], HASHES)).tiers == ()
        with pytest.raises(RepriseError, match=r"tiers.*must be TIER_HOST and TIER_DISK"):
            await store.client.evict(KEYSPACE, tiers=[StoreTier.EXTERNAL])


async def test_in_front_of_redis(tmp_path: Path, valkey: ValkeyProcess) -> None:
    settings = {"redis_url": valkey.url, "capacity_bytes": 0}
    async with running_store(disk_folder=str(tmp_path / "a"), **settings) as first:
        await first.until_redis_is(True)
        generation = await fill(first)
        await first.settled()
    async with running_store(disk_folder=str(tmp_path / "b"), **settings) as second:
        await second.until_redis_is(True)
        assert (await second.client.lookup(KEYSPACE, [0], HASHES)).tiers == (StoreTier.EXTERNAL,) * 12
        _, values = await second.peer.load(generation, KEYS)
        assert values == VALUES
        # What came from Redis is on this machine's disk from then on.
        await until(lambda: second.metric("disk_blocks") == 12)
        assert (await second.client.lookup(KEYSPACE, [0], HASHES)).tiers == (StoreTier.DISK,) * 12
        # A reset by anybody holds for the disk, too.
        async with running_store(**settings) as other:
            await other.until_redis_is(True)
            await other.client.reset(KEYSPACE)
        assert (await second.client.lookup(KEYSPACE, [0], HASHES)).tiers == ()
        assert second.metric("disk_blocks") == 0
    # The first one's folder is of the generation before.
    async with running_store(disk_folder=str(tmp_path / "a"), **settings) as again:
        await again.until_redis_is(True)
        assert (await again.client.lookup(KEYSPACE, [0], HASHES)).tiers == ()
        assert again.metric("disk_blocks") == 0
