"""A store in front of a primary that sentinels watch: a fail-over, and the store goes on by itself."""

import asyncio
from pathlib import Path

import pytest
import trustme

from support.redis_sites import make_tls_files, sentinel_site, skip_without_tls
from support.store_harness import KEYSPACE, RunningStore, block_hashes, keys_of, running_store
from support.waiting import until

DOWN_AFTER_S = 0.5


async def written(store: RunningStore, start: int) -> bool:
    """Whether four new blocks reached Redis."""
    before = store.metric("saves_total", tier="external", outcome="written")
    hashes = block_hashes(4, start)
    generation = (await store.client.lookup(KEYSPACE, [0], hashes)).generation
    saved = await store.peer.save(generation, keys_of(hashes), [b"v" * 20_000] * 4)
    assert saved.accepted == (True,) * 4  # in host memory, whatever Redis does
    await store.settled()
    return store.metric("saves_total", tier="external", outcome="written") == before + 4


@pytest.mark.parametrize("how", ["killed", "hanging"])
async def test_a_fail_over_is_followed(tmp_path: Path, how: str) -> None:
    with sentinel_site(tmp_path, down_after_ms=int(1000 * DOWN_AFTER_S)) as site:
        async with running_store(
            **site.settings(), redis_timeout_s=0.5, breaker_cooldown_s=0.2, capacity_bytes=1_000_000
        ) as store:
            await store.until_redis_is(up=True)
            assert await written(store, 0)
            generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
            loop = asyncio.get_running_loop()
            (primary,), (replica,) = site.servers, site.replicas
            replica.command("REPLICAOF", "127.0.0.1", primary.port)
            primary.command("WAIT", 1, 5000)
            primary.kill() if how == "killed" else primary.pause()
            killed_s, attempt, promoted_s = loop.time(), 1, 0.0
            while not await written(store, 10 * attempt):
                attempt += 1
                if not promoted_s and replica.command("ROLE")[0] == b"master":
                    promoted_s = loop.time()
                assert loop.time() - killed_s < 60
                await asyncio.sleep(0.05)
            recovered_s = loop.time()
            print(
                f"fail-over, {how}: {(promoted_s or recovered_s) - killed_s:.2f} s until the promotion, "
                f"{recovered_s - killed_s:.2f} s until a save reached it ({attempt} attempts)"
            )
            # The replica has the generation, so blocks from before are still good.
            assert (await store.client.lookup(KEYSPACE, [0], [])).generation == generation
            assert replica.command("ROLE")[0] == b"master"
            assert await store.client.reset(KEYSPACE) == generation + 1
            primary.resume() if how == "hanging" else primary.start()
            # It still takes itself for a primary, and the store does not go back to it.
            assert await written(store, 5000)
            assert primary.command("DBSIZE") < replica.command("DBSIZE")


async def test_a_demoted_primary_is_left_at_the_first_refused_write(tmp_path: Path) -> None:
    with sentinel_site(tmp_path) as site:
        async with running_store(**site.settings(), redis_timeout_s=2.0, breaker_cooldown_s=0.2) as store:
            await store.until_redis_is(up=True)
            assert await written(store, 0)
            (primary,) = site.servers
            primary.command("REPLICAOF", "127.0.0.1", site.replicas[0].port)  # read-only from now on
            generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
            await store.peer.save(generation, keys_of(block_hashes(4, 10)), [b"v" * 20_000] * 4)
            await until(lambda: store.metric("redis_failures_total", kind="down") > 0, 30)
            primary.command("REPLICAOF", "NO", "ONE")
            # What was saved meanwhile waits, and is written then.
            await until(lambda: store.metric("saves_total", tier="external", outcome="written") == 8, 30)
            assert store.metric("saves_total", tier="external", outcome="dropped") == 0


async def test_sentinels_and_servers_with_tls(tmp_path: Path) -> None:
    skip_without_tls()
    files = make_tls_files(tmp_path, trustme.CA(), "node", "127.0.0.1")
    with sentinel_site(tmp_path, tls=files) as site:
        site.security |= {"tls_ca_file": str(files.ca)}
        site.security |= {"tls_cert_file": str(files.cert), "tls_key_file": str(files.key)}
        async with running_store(**site.settings(), redis_timeout_s=2.0) as store:
            await store.until_redis_is(up=True)
            assert await written(store, 0)
