"""A store in front of a Redis Cluster: a node away costs its own keys, slots move, two stores share."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trustme
import zmq
import zmq.asyncio
from redis.crc import key_slot

from reprise_store.adapters.redis_backend import generation_key
from reprise_store.keys import scope_of
from reprise_wire.block_transfer import BlockKey, redis_key
from reprise_wire.store_codec import StoreTier
from support.redis_sites import RedisSite, cluster_site, make_tls_files, skip_without_tls, wait_for
from support.store_harness import KEYSPACE, Peer, RunningStore, block_hashes, keys_of, running_store
from support.valkey_server import ValkeyProcess
from support.waiting import until

NUM_BLOCKS = 40
HASHES = block_hashes(NUM_BLOCKS)
EXTERNAL = StoreTier.EXTERNAL
TIMEOUT_S = 1.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[RedisSite]:
    with cluster_site(tmp_path) as site:
        yield site


def store_on(site: RedisSite, **settings: object) -> "AsyncExitStack":
    defaults: dict[str, object] = {"capacity_bytes": 0, "redis_timeout_s": TIMEOUT_S, "breaker_failures": 2}
    return running_store(**{**defaults, **site.settings(), **settings})  # type: ignore[return-value]


def server_of(site: RedisSite, key: bytes) -> ValkeyProcess:
    number = key_slot(key) * len(site.servers) // 16384
    return site.servers[number]


def generation_server(site: RedisSite) -> ValkeyProcess:
    return server_of(site, generation_key(scope_of(KEYSPACE)))


async def save(store: RunningStore, num_blocks: int = NUM_BLOCKS, *, settle: bool = True) -> int:
    """The generation of the saved blocks; block i is a value of i + 1000 bytes."""
    generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
    values = [bytes([i]) * (i + 1000) for i in range(num_blocks)]
    await store.peer.save(generation, keys_of(HASHES[:num_blocks]), values)
    if settle:
        await store.settled()
    return generation


def num_written(store: RunningStore) -> float:
    return store.metric("saves_total", tier="external", outcome="written")


async def load(store: RunningStore, generation: int) -> list[int]:
    """Which blocks came back, and whole."""
    _, values = await store.peer.load(generation, keys_of(HASHES))
    assert all(value == bytes([i]) * (i + 1000) for i, value in enumerate(values) if value)
    return [i for i, value in enumerate(values) if value]


def living_on(site: RedisSite, generation: int, servers: list[ValkeyProcess]) -> list[int]:
    keys = [redis_key(KEYSPACE, generation, key).encode() for key in keys_of(HASHES)]
    return [i for i, key in enumerate(keys) if server_of(site, key) in servers]


async def test_two_stores_share_blocks_and_resets_over_all_nodes(site: RedisSite) -> None:
    async with store_on(site) as one, store_on(site) as two:
        generation = await save(one)
        assert all(server.command("DBSIZE") > 5 for server in site.servers)
        assert (await two.client.lookup(KEYSPACE, [0], HASHES)).tiers == (EXTERNAL,) * NUM_BLOCKS
        assert await load(two, generation) == list(range(NUM_BLOCKS))
        after = await two.client.reset(KEYSPACE)
        assert after == generation + 1
        lookup = await one.client.lookup(KEYSPACE, [0], HASHES)
        assert (lookup.generation, lookup.tiers) == (after, ())
        # The old blocks are swept from every node; the generation stays.
        await asyncio.to_thread(
            wait_for, lambda: sum(server.command("DBSIZE") for server in site.servers) == 1
        )


async def test_a_node_away_costs_its_own_keys_and_no_time(site: RedisSite) -> None:
    async with store_on(site) as store:
        generation = await save(store)
        victim = next(server for server in site.servers if server is not generation_server(site))
        others = [server for server in site.servers if server is not victim]
        served = living_on(site, generation, others)
        assert 0 < len(served) < NUM_BLOCKS
        victim.pause()  # hangs, the worst way of being away
        loop = asyncio.get_running_loop()
        for _ in range(2):
            assert await load(store, generation) == served
        started_s = loop.time()
        for _ in range(3):
            assert await load(store, generation) == served
        # At most one of them, the probe, waits for the node.
        assert loop.time() - started_s < 2 * TIMEOUT_S
        stats = await store.client.stats()
        assert stats.redis_connected
        assert store.metric("breaker_state", breaker="calls") == 0
        assert await store.client.reset(KEYSPACE) == generation + 1
        after = await save(store, settle=False)
        num_served = len(living_on(site, after, others))
        await until(lambda: num_written(store) == NUM_BLOCKS + num_served, 30)
        assert store.metric("breaker_state", breaker="writes") == 0
        assert store.metric("save_queue_blocks") == NUM_BLOCKS - num_served
        # What is the node's waits for it.
        victim.resume()
        await store.settled()
        assert store.metric("saves_total", tier="external", outcome="dropped") == 0
        assert await load(store, after) == list(range(NUM_BLOCKS))


async def test_a_full_node_takes_nothing_and_the_others_do(site: RedisSite) -> None:
    async with store_on(site) as store:
        generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
        victim = next(server for server in site.servers if server is not generation_server(site))
        victim.command("CONFIG", "SET", "maxmemory", "1")
        policies = await store.app._redis.memory_policies()
        advised = [policy.node for policy in policies if policy.advice(blocks_expire=True)]
        assert advised == [f"127.0.0.1:{victim.port}"]
        others = [server for server in site.servers if server is not victim]
        for _ in range(2):
            await save(store)
        assert await load(store, generation) == living_on(site, generation, others)
        assert store.metric("breaker_state", breaker="writes") == 0
        assert store.metric("saves_dropped_total", reason="no_room") > 0
        assert store.metric("save_retries_total") == 0, "it refuses them for their own sake"


async def test_a_cluster_with_tls(tmp_path: Path) -> None:
    skip_without_tls()
    files = make_tls_files(tmp_path, trustme.CA(), "node", "127.0.0.1")
    with cluster_site(tmp_path, num_nodes=1, tls=files) as site:
        site.security = {"tls_ca_file": str(files.ca)}
        site.security |= {"tls_cert_file": str(files.cert), "tls_key_file": str(files.key)}
        async with store_on(site) as store:
            generation = await save(store)
            assert await load(store, generation) == list(range(NUM_BLOCKS))


async def test_without_the_generations_node_the_last_known_one_holds(site: RedisSite) -> None:
    async with store_on(site) as store:
        generation = await save(store)
        victim = generation_server(site)
        others = [server for server in site.servers if server is not victim]
        victim.kill()
        served = living_on(site, generation, others)
        for _ in range(4):
            assert await load(store, generation) == served
        with pytest.raises(Exception, match="redis"):
            await store.client.reset(KEYSPACE)
        assert (await store.client.stats()).redis_connected


async def test_all_nodes_away_and_back(site: RedisSite) -> None:
    async with store_on(site, capacity_bytes=1_000_000, redis_timeout_s=0.2) as store:
        await save(store)
        for server in site.servers:
            server.pause()
        for _ in range(6):
            await store.client.lookup(KEYSPACE, [0], block_hashes(3, 500))
        await store.until_redis_is(up=False)
        assert store.app.readiness.ready
        for server in site.servers:
            server.resume()
        await store.until_redis_is(up=True)
        assert (await store.client.lookup(KEYSPACE, [0], HASHES)).tiers == (StoreTier.HOST,) * NUM_BLOCKS


async def test_slots_that_move_are_followed(site: RedisSite) -> None:
    async with store_on(site) as store:
        generation = await save(store)
        key = redis_key(KEYSPACE, generation, keys_of(HASHES)[7]).encode()
        slot, source = key_slot(key), server_of(site, key)
        target = next(server for server in site.servers if server is not source)
        source_id, target_id = source.command("CLUSTER", "MYID"), target.command("CLUSTER", "MYID")
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        source.command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", key)
        # Half way: the source says ASK.
        assert await load(store, generation) == list(range(NUM_BLOCKS))
        for server in site.servers:
            server.command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
        # Done: the source says MOVED, until the slots are read anew.
        assert await load(store, generation) == list(range(NUM_BLOCKS))
        assert await save(store) == generation
        assert await load(store, generation) == list(range(NUM_BLOCKS))


async def test_slots_of_the_generation_move(site: RedisSite) -> None:
    async with store_on(site) as store:
        generation = await save(store)
        key = generation_key(scope_of(KEYSPACE))
        slot, source = key_slot(key), generation_server(site)
        target = next(server for server in site.servers if server is not source)
        source_id, target_id = source.command("CLUSTER", "MYID"), target.command("CLUSTER", "MYID")
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        source.command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", key)
        assert await store.client.reset(KEYSPACE) == generation + 1
        for server in site.servers:
            server.command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
        assert await store.client.reset(KEYSPACE) == generation + 2
        assert (await store.client.lookup(KEYSPACE, [0], HASHES)).generation == generation + 2


@pytest.mark.parametrize("how", ["killed", "hanging"])
async def test_a_replica_takes_over_while_blocks_are_loaded_and_saved(tmp_path: Path, how: str) -> None:
    """The node that has the generation, which is the worst to lose."""
    with cluster_site(tmp_path, with_replicas=True) as site:
        async with store_on(site) as store:
            generation = await save(store)
            victim = generation_server(site)
            replica = site.replicas[site.servers.index(victim)]
            on_others = living_on(
                site, generation, [server for server in site.servers if server is not victim]
            )
            assert 0 < len(on_others) < NUM_BLOCKS
            for server in site.servers:
                assert server.command("WAIT", 1, 10_000) == 1
            saver = Saver(store, generation)
            saving = asyncio.ensure_future(saver.run())
            loop = asyncio.get_running_loop()
            await until(lambda: saver.num_saved > 50)
            victim.kill() if how == "killed" else victim.pause()
            lost_s, saver.first_after = loop.time(), saver.num_saved
            promoted_s = loaded_s = 0.0
            async with asyncio.timeout(60):
                while not loaded_s:
                    loaded = await load(store, generation)
                    assert not saving.done(), saving
                    if not promoted_s and replica.command("ROLE")[0] == b"master":
                        promoted_s = loop.time()
                    loaded_s = loop.time() if len(loaded) == NUM_BLOCKS else 0.0
                    await asyncio.sleep(0.02)
            await until(lambda: saver.num_saved > saver.first_after + 50)
            saver.goes_on = False
            await saving
            await store.settled()
            print(
                f"fail-over, {how}: {(promoted_s or loaded_s) - lost_s:.2f} s until the promotion was seen, "
                f"{loaded_s - lost_s:.2f} s until every block was loaded again, "
                f"{loop.time() - lost_s:.2f} s until all {saver.num_saved} saved ones were written, "
                f"{store.metric('save_retries_total'):.0f} tries again"
            )
            # Nothing of what was saved meanwhile is lost: it waited for the replica.
            assert store.metric("saves_total", tier="external", outcome="dropped") == 0
            assert num_written(store) == NUM_BLOCKS + saver.num_saved
            assert store.metric("save_retries_total") > 0
            await saver.check_all_is_there()
            assert (await store.client.stats()).redis_connected
            assert await store.client.reset(KEYSPACE) == generation + 1
            after = await save(store)
            # The lost one comes back as a replica.
            victim.start() if how == "killed" else victim.resume()
            await until(lambda: victim.command("ROLE")[0] == b"slave")
            assert await load(store, after) == list(range(NUM_BLOCKS))


class Saver:
    """One new block after the other, over all nodes."""

    def __init__(self, store: RunningStore, generation: int) -> None:
        self._store = store
        self._generation = generation
        self.goes_on = True
        self.num_saved = 0
        self.first_after = 0
        """The first that was saved after the node was lost; what it had taken just before is lost with it."""

    def block(self, number: int) -> tuple[BlockKey, bytes]:
        (key,) = keys_of(block_hashes(1, 1000 + number))
        return key, number.to_bytes(4, "big") * 500

    async def run(self) -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(self._store.app.blocks_endpoint)
            peer = Peer(dealer)
            while self.goes_on:
                key, value = self.block(self.num_saved)
                assert (await peer.save(self._generation, [key], [value])).accepted == (True,)
                self.num_saved += 1
                await asyncio.sleep(0.01)

    async def check_all_is_there(self) -> None:
        blocks = [self.block(number) for number in range(self.first_after, self.num_saved)]
        for start in range(0, len(blocks), 100):
            part = blocks[start : start + 100]
            _, values = await self._store.peer.load(self._generation, [key for key, _ in part])
            assert values == [value for _, value in part]
