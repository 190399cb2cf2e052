"""Redis away, slow, full, locked: the store stays up and ready, and recovers by itself."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprise_core.errors import ErrorKind
from reprise_core.ids import BlockHash
from reprise_wire.block_transfer import TransferKind, redis_key
from reprise_wire.error_codec import PeerError
from reprise_wire.store_codec import StoreTier
from support.store_harness import KEYSPACE, RunningStore, block_hash, block_hashes, keys_of, running_store
from support.tcp_proxy import TcpProxy
from support.valkey_server import ValkeyProcess
from support.waiting import until

HOST, EXTERNAL = StoreTier.HOST, StoreTier.EXTERNAL
TIMEOUT_S = 0.2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyProcess]:
    server = ValkeyProcess(tmp_path)
    yield server
    server.kill()


async def save_and_load(store: RunningStore, start: int, num_blocks: int = 4) -> None:
    """A round trip that must work whatever Redis does."""
    hashes = block_hashes(num_blocks, start)
    generation = (await store.client.lookup(KEYSPACE, [0], hashes)).generation
    saved = await store.peer.save(generation, keys_of(hashes), [b"v" * 1000] * num_blocks)
    assert saved.accepted == (True,) * num_blocks
    lookup = await store.client.lookup(KEYSPACE, [0], hashes)
    assert lookup.tiers == (HOST,) * num_blocks
    _, values = await store.peer.load(lookup.generation, keys_of(hashes))
    assert values == [b"v" * 1000] * num_blocks


def saves(store: RunningStore) -> tuple[float, float]:
    """Blocks written to Redis, and dropped on the way."""
    written, dropped = (
        store.metric("saves_total", tier="external", outcome=how) for how in ("written", "dropped")
    )
    return written, dropped


async def test_redis_may_come_later(server: ValkeyProcess) -> None:
    async with running_store(redis_url=server.url) as store:
        assert store.app.readiness.ready
        await save_and_load(store, 0)
        before = await store.client.lookup(KEYSPACE, [0], block_hashes(4))
        with pytest.raises(PeerError, match="redis") as caught:
            await store.client.reset(KEYSPACE)
        assert caught.value.kind is ErrorKind.UNAVAILABLE
        server.start()
        await store.until_redis_is(up=True)
        # What was kept meanwhile stays: the fresh Redis takes over the store's own generation.
        assert await store.client.lookup(KEYSPACE, [0], block_hashes(4)) == before
        await save_and_load(store, 10)
        await store.settled()
        assert saves(store) == (8, 0)
        assert await store.client.reset(KEYSPACE) == before.generation + 1


async def test_killed_and_started_again_in_the_middle(server: ValkeyProcess) -> None:
    server.start()
    async with running_store(redis_url=server.url, redis_timeout_s=TIMEOUT_S) as store:
        await save_and_load(store, 0)
        await store.settled()
        loads = [
            asyncio.ensure_future(store.client.lookup(KEYSPACE, [0], block_hashes(64, 1000 * i)))
            for i in range(20)
        ]
        server.kill()
        await asyncio.gather(*loads)
        await save_and_load(store, 10)
        await store.until_redis_is(up=False)
        assert store.app.readiness.ready
        assert (await store.client.lookup(KEYSPACE, [0], block_hashes(4))).tiers == (HOST,) * 4
        await save_and_load(store, 20)
        assert store.metric("breaker_state", breaker="calls") in (1, 2)
        server.start()
        started_s = asyncio.get_running_loop().time()
        await store.until_redis_is(up=True)
        assert asyncio.get_running_loop().time() - started_s < 2
        # It came back empty: nobody knows what was reset meanwhile, so all begins anew.
        await save_and_load(store, 30)
        await store.settled()
        written = store.metric("saves_total", tier="external", outcome="written")
        await save_and_load(store, 40)
        await store.settled()
        assert store.metric("saves_total", tier="external", outcome="written") == written + 4


@pytest.mark.parametrize("how", ["killed", "hanging"])
async def test_what_is_saved_while_redis_is_away_is_there_afterwards(tmp_path: Path, how: str) -> None:
    """Of a flood of saves all that fitted into the queue, while memory stays within its limit."""
    server = ValkeyProcess(tmp_path, "--appendonly", "yes").start()
    num_bytes, limit_blocks = 20_000, 60
    try:
        async with running_store(
            redis_url=server.url,
            redis_timeout_s=TIMEOUT_S,
            capacity_bytes=0,
            save_queue_bytes=limit_blocks * num_bytes,
            redis_chunk_bytes=10 * num_bytes,
        ) as store:
            generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
            kept: list[BlockHash] = []
            for number in range(200):
                if number == 20:
                    server.kill() if how == "killed" else server.pause()
                (block,) = block_hashes(1, number)
                answer = await store.peer.save(generation, keys_of([block]), [bytes([number]) * num_bytes])
                kept += [block] * answer.accepted[0]
                assert store.metric("save_queue_bytes") <= limit_blocks * num_bytes
            assert store.metric("saves_dropped_total", reason="queue_full") == 200 - len(kept) > 0
            assert len(kept) >= limit_blocks
            await store.until_redis_is(up=False)
            server.start() if how == "killed" else server.resume()
            await store.settled()
            assert saves(store) == (len(kept), 200 - len(kept))
            assert store.metric("save_retries_total") > 0
            for block in kept:
                (key,) = keys_of([block])
                value = server.command("GET", redis_key(KEYSPACE, generation, key))
                assert value == block[-1:] * num_bytes
    finally:
        server.kill()


async def test_what_was_reset_while_redis_was_away_is_not_written(tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path).start()
    try:
        async with (
            running_store(redis_url=server.url, redis_timeout_s=TIMEOUT_S, capacity_bytes=0) as store,
            TcpProxy(server.port) as proxy,
            running_store(
                redis_url=f"redis://127.0.0.1:{proxy.port}/0", redis_timeout_s=TIMEOUT_S
            ) as cut_off,
        ):
            generation = (await cut_off.client.lookup(KEYSPACE, [0], [])).generation
            proxy.hold()
            await save_and_load(cut_off, 0)
            assert await store.client.reset(KEYSPACE) == generation + 1
            proxy.let_go()
            await cut_off.settled()
            assert saves(cut_off) == (0, 4)
            assert cut_off.metric("saves_dropped_total", reason="stale") == 4
            assert server.command("DBSIZE") == 1  # the generation
    finally:
        server.kill()


async def test_a_generation_stays_while_everything_else_is_evicted(tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path, "--maxmemory", "6mb", "--maxmemory-policy", "volatile-lru").start()
    try:
        async with running_store(redis_url=server.url, capacity_bytes=0) as store:
            hashes = block_hashes(200)
            generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
            for block in hashes:
                await store.peer.save(generation, keys_of([block]), [b"v" * 100_000])
                await store.settled()
            assert saves(store) == (200, 0)
            keys = server.command("KEYS", "*")
            assert f"test:generation:{KEYSPACE.fingerprint}".encode() in keys
            assert 10 < len(keys) < 100
    finally:
        server.kill()


async def test_a_lost_generation_begins_anew_and_is_told(
    server: ValkeyProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start()
    async with running_store(redis_url=server.url) as store:
        await save_and_load(store, 0)
        await store.settled()
        before = (await store.client.lookup(KEYSPACE, [0], block_hashes(4))).generation
        server.command("DEL", f"test:generation:{KEYSPACE.fingerprint}")
        lookup = await store.client.lookup(KEYSPACE, [0], block_hashes(4))
        assert (lookup.tiers, lookup.generation == before) == ((), False)
        assert store.metric("generation_changes_total") == 1
        assert "a generation was lost" in capsys.readouterr().out
        await save_and_load(store, 0)


async def test_what_waits_too_long_is_dropped(server: ValkeyProcess) -> None:
    async with running_store(redis_url=server.url, save_queue_age_s=0.3) as store:
        await save_and_load(store, 0)
        await store.settled()
        assert store.metric("saves_dropped_total", reason="expired") == 4
        server.start()
        await save_and_load(store, 10)
        await store.settled()
        assert saves(store) == (4, 4)


async def test_a_server_that_hangs_costs_one_timeout_and_then_nothing(server: ValkeyProcess) -> None:
    server.start()
    async with running_store(
        redis_url=server.url, redis_timeout_s=TIMEOUT_S, breaker_failures=2, breaker_cooldown_s=0.5
    ) as store:
        await save_and_load(store, 0)
        await store.settled()
        generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
        server.pause()
        await save_and_load(store, 10)
        await store.until_redis_is(up=False)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        await save_and_load(store, 20)
        assert loop.time() - started_s < TIMEOUT_S
        server.resume()
        await store.until_redis_is(up=True)
        # Still the same server, so what it had is still good.
        lookup = await store.client.lookup(KEYSPACE, [0], block_hashes(4))
        assert (lookup.generation, lookup.tiers) == (generation, (HOST,) * 4)


async def test_loads_in_flight_when_it_hangs_come_back_empty(server: ValkeyProcess) -> None:
    server.start()
    async with running_store(redis_url=server.url, redis_timeout_s=TIMEOUT_S, capacity_bytes=0) as store:
        generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
        await store.peer.save(generation, keys_of(block_hashes(2)), [b"v"] * 2)
        await store.settled()
        server.pause()
        answer, values = await store.peer.load(generation, keys_of(block_hashes(2)))
        assert (answer.kind, values) == (TransferKind.LOADED, [b"", b""])
        server.resume()
        await store.until_redis_is(up=True)
        _, values = await store.peer.load(generation, keys_of(block_hashes(2)))
        assert values == [b"v"] * 2


async def test_wrong_password_and_the_right_one_later(tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path, password="before").start()
    try:
        async with running_store(redis_url=server.url, redis_timeout_s=TIMEOUT_S) as store:
            await save_and_load(store, 0)
            await store.settled()
            server.kill()
            server.password = "after"
            server.start()
            await store.until_redis_is(up=False)
            await asyncio.sleep(0.5)
            assert not (await store.client.stats()).redis_connected
            assert store.app.readiness.ready
            await save_and_load(store, 10)
            assert store.metric("redis_failures_total", kind="down") > 0
            server.kill()
            server.password = "before"
            server.start()
            await store.until_redis_is(up=True)
            await save_and_load(store, 20)
    finally:
        server.kill()


async def test_a_full_redis_takes_no_saves_and_still_serves(tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction").start()
    try:
        async with running_store(redis_url=server.url, capacity_bytes=1_000_000) as store:
            generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
            for number in range(60):
                await store.peer.save(generation, keys_of([block_hash(number)]), [b"x" * 100_000])
            await until(lambda: store.metric("saves_dropped_total", reason="no_room") > 0, 30)
            assert store.metric("breaker_state", breaker="writes") > 0
            # Reads are not the worse for it.
            assert store.metric("breaker_state", breaker="calls") == 0
            assert (await store.client.lookup(KEYSPACE, [0], [block_hash(0)])).tiers == (EXTERNAL,)
            assert (await store.client.lookup(KEYSPACE, [0], [block_hash(59)])).tiers == (HOST,)
            # It is away for a moment, and still full: what waits shows that again and again, one by one.
            server.pause()
            for number in range(60, 120):
                await store.peer.save(generation, keys_of([block_hash(number)]), [b"x" * 100_000])
            assert (await store.client.lookup(KEYSPACE, [0], [block_hash(0)])).tiers == ()
            server.resume()
            await store.until_redis_is(up=True)
            refused = store.metric("saves_dropped_total", reason="no_room")
            await until(lambda: store.metric("saves_dropped_total", reason="no_room") > refused + 1, 30)
            assert store.metric("breaker_state", breaker="calls") == 0
            assert (await store.client.lookup(KEYSPACE, [0], [block_hash(0)])).tiers == (EXTERNAL,)
            # Room again: writing goes on by itself.
            server.command("CONFIG", "SET", "maxmemory", "100mb")
            await store.settled()
            assert store.metric("breaker_state", breaker="writes") == 0
            written, dropped = saves(store)
            assert written + dropped == 120
            assert dropped == store.metric("saves_dropped_total", reason="no_room")
    finally:
        server.kill()


async def test_a_slow_redis_keeps_memory_bounded(server: ValkeyProcess) -> None:
    server.start()
    limit_bytes = 2_000_000
    async with running_store(
        redis_url=server.url,
        redis_timeout_s=TIMEOUT_S,
        capacity_bytes=1_000_000,
        save_queue_bytes=limit_bytes,
        redis_chunk_bytes=500_000,
    ) as store:
        generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
        server.pause()
        for number in range(100):
            await store.peer.save(generation, keys_of([block_hash(number)]), [b"x" * 100_000])
            assert store.metric("save_queue_bytes") <= limit_bytes
        assert (await store.client.stats()).dropped_saves > 0
        server.resume()
        await store.settled()
        await store.until_redis_is(up=True)
        await save_and_load(store, 1000)


async def test_a_stop_writes_what_is_queued(server: ValkeyProcess) -> None:
    server.start()
    hashes = block_hashes(50)
    async with running_store(redis_url=server.url) as store:
        generation = (await store.client.lookup(KEYSPACE, [0], hashes)).generation
        await store.peer.save(generation, keys_of(hashes), [b"x" * 100_000] * 50)
    async with running_store(redis_url=server.url) as after:
        assert (await after.client.lookup(KEYSPACE, [0], hashes)).tiers == (EXTERNAL,) * 50
