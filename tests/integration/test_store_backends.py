"""One suite for every place that keeps blocks: host memory, and Redis over real servers."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from prometheus_client import CollectorRegistry

from reprise_core.ids import BlockHash
from reprise_store.adapters.redis_backend import RedisBackend, by_bytes
from reprise_store.adapters.redis_connections import RedisSecurity
from reprise_store.adapters.shared_arena import SharedArena
from reprise_store.compressed_backend import CompressedBackend
from reprise_store.keys import Scope, scope_of
from reprise_store.memory_backend import MemoryBackend
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import Backend, BackendBusy, BackendDown
from reprise_store.value_codec import Codec
from reprise_wire.block_transfer import BlockKey, Keyspace, redis_key
from support.redis_sites import LIMITS, SITES, RedisSite, make_backend, make_tls_files, tls_site, unix_site
from support.valkey_server import ValkeyProcess
from support.waiting import until

KEYSPACE = Keyspace("test", "ab" * 16)
OTHER = Keyspace("test", "cd" * 16)
SCOPE = scope_of(KEYSPACE)


def name(number: int, generation: int = 5, keyspace: Keyspace = KEYSPACE) -> str:
    block_hash = BlockHash(number.to_bytes(32, "big"))
    return redis_key(keyspace, generation, BlockKey(0, 0, block_hash))


class BackendContract:
    """`backend` is empty and has room for at least 4 MiB."""

    async def test_what_is_put_is_found_and_comes_back_whole(self, backend: Backend) -> None:
        items = [(name(i), bytes([i]) * (1000 + i)) for i in range(30)]
        assert await backend.put(SCOPE, items) == [True] * 30
        names = [key for key, _ in items]
        assert (await backend.exists(SCOPE, [*names, name(99)])).found == [True] * 30 + [False]
        got = await backend.get(SCOPE, [name(99), *names])
        assert got.values[0] is None
        assert [bytes(value) for value in got.values[1:] if value is not None] == [v for _, v in items]

    async def test_a_put_replaces(self, backend: Backend) -> None:
        await backend.put(SCOPE, [(name(1), b"old")])
        await backend.put(SCOPE, [(name(1), memoryview(b"newer"))])
        assert (await backend.get(SCOPE, [name(1)])).values == [b"newer"]

    async def test_values_larger_than_a_chunk(self, backend: Backend) -> None:
        items = [(name(i), bytes([i]) * 300_000) for i in range(4)]
        assert await backend.put(SCOPE, items) == [True] * 4
        got = await backend.get(SCOPE, [key for key, _ in items])
        assert [value == items[i][1] for i, value in enumerate(got.values)] == [True] * 4

    async def test_no_keys(self, backend: Backend) -> None:
        assert (await backend.exists(SCOPE, [])).found == []
        assert (await backend.get(SCOPE, [])).values == []
        assert await backend.put(SCOPE, []) == []

    async def test_a_scope_begins_with_the_first_proposal(self, backend: Backend) -> None:
        assert (await backend.exists(SCOPE, [])).generation is None
        assert await backend.ensure_generation(SCOPE, 700) == 700
        assert await backend.ensure_generation(SCOPE, 900) == 700
        assert (await backend.exists(SCOPE, [name(1)])).generation == 700
        assert (await backend.get(SCOPE, [name(1)])).generation == 700
        assert (await backend.get(SCOPE, [])).generation == 700

    async def test_advancing_counts_up_and_leaves_other_scopes_alone(self, backend: Backend) -> None:
        other = scope_of(OTHER)
        await backend.ensure_generation(other, 3)
        assert await backend.advance_generation(SCOPE, 41) == 42
        assert await backend.advance_generation(SCOPE, 41) == 43
        assert await backend.ensure_generation(other, 9) == 3

    async def test_stale_blocks_go_and_only_they(self, backend: Backend) -> None:
        await backend.put(SCOPE, [(name(i, generation=4), b"old") for i in range(20)])
        await backend.put(SCOPE, [(name(1, generation=5), b"new")])
        await backend.put(scope_of(OTHER), [(name(1, generation=4, keyspace=OTHER), b"other")])
        assert await backend.delete_stale(SCOPE, 5) == 20
        assert (await backend.exists(SCOPE, [name(0, generation=4), name(1, generation=5)])).found == [
            False,
            True,
        ]
        assert (await backend.get(scope_of(OTHER), [name(1, 4, OTHER)])).values == [b"other"]

    async def test_readers_never_see_half_a_value(self, backend: Backend) -> None:
        versions = [bytes([i]) * 200_000 for i in range(4)]

        async def write() -> None:
            for _ in range(10):
                for value in versions:
                    await backend.put(SCOPE, [(name(1), value)])

        async def read() -> None:
            for _ in range(40):
                (value,) = (await backend.get(SCOPE, [name(1)])).values
                assert value is None or value in versions

        await asyncio.gather(write(), write(), read(), read())


class TestMemoryBackend(BackendContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return MemoryBackend(64 * 1024 * 1024)


@pytest.fixture(scope="module", params=SITES)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisSite]:
    with SITES[request.param](tmp_path_factory.mktemp(request.param)) as site:
        yield site


class TestRedisBackend(BackendContract):
    """With each way that Redis can be set up."""

    @pytest.fixture
    async def backend(self, site: RedisSite) -> AsyncIterator[RedisBackend]:
        site.flush()
        backend = site.backend()
        yield backend
        await backend.close()

    async def test_every_server_is_asked_for_its_memory_policy(
        self, backend: RedisBackend, site: RedisSite
    ) -> None:
        await backend.probe()
        policies = await backend.memory_policies()
        assert [policy.max_bytes for policy in policies] == [0] * len(site.servers)

    async def test_many_connections_at_once(self, backend: RedisBackend) -> None:
        got = await asyncio.gather(*(backend.get(SCOPE, [name(i)]) for i in range(40)))
        assert [one.values for one in got] == [[None]] * 40


class TestRedisBackendWithExpiry(BackendContract):
    @pytest.fixture
    async def backend(self, valkey: RedisSite) -> AsyncIterator[RedisBackend]:
        backend = valkey.backend(replace(LIMITS, ttl_s=60))
        yield backend
        await backend.close()

    async def test_a_load_starts_the_expiry_again(self, backend: RedisBackend, valkey: RedisSite) -> None:
        (server,) = valkey.servers
        await backend.put(SCOPE, [(name(1), b"value")])
        assert 59_000 < server.command("PTTL", name(1)) <= 60_000
        server.command("PEXPIRE", name(1), 1000)
        await backend.get(SCOPE, [name(1)])
        assert server.command("PTTL", name(1)) > 59_000


class TestCompressedBackend(BackendContract):
    @pytest.fixture
    async def backend(self, valkey: RedisSite) -> AsyncIterator[Backend]:
        backend = valkey.backend()
        yield CompressedBackend(
            backend,
            Codec.ZSTD,
            max_value_bytes=LIMITS.max_value_bytes,
            allocate=lambda nbytes: None,
            metrics=StoreMetrics(CollectorRegistry()),
        )
        await backend.close()


@pytest.fixture(scope="module")
def unix_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisSite]:
    with unix_site(tmp_path_factory.mktemp("valkey")) as site:
        yield site


@pytest.fixture
async def valkey(unix_valkey: RedisSite) -> RedisSite:
    unix_valkey.flush()
    return unix_valkey


async def test_one_value_per_block_under_the_documented_key(valkey: RedisSite) -> None:
    backend = valkey.backend()
    keyspace = Keyspace("ns", "12" * 16, adapter="feedbeef", tp_size=2)
    await backend.put(
        scope_of(keyspace), [(redis_key(keyspace, 8, BlockKey(1, 3, BlockHash(b"h" * 16))), b"v")]
    )
    await backend.ensure_generation(Scope("ns", "12" * 16), 8)
    assert sorted(valkey.servers[0].command("KEYS", "*")) == [
        b"ns:8:" + b"12" * 16 + b":feedbeef:2:1:3:" + b"68" * 16,
        b"ns:generation:" + b"12" * 16,
    ]
    await backend.close()


async def test_values_are_received_where_they_are_wanted(valkey: RedisSite) -> None:
    arena = SharedArena(16 * 1024 * 1024)
    backend = valkey.backend(allocate=arena.allocate)
    payload = random.Random(5).randbytes(300_000)
    await backend.put(SCOPE, [(name(1), payload), (name(2), b"short"), (name(3), b"x" * 9_000_000)])
    large, short, too_large = (await backend.get(SCOPE, [name(1), name(2), name(3)])).values
    assert large is not None
    assert arena.place_of(large) is not None
    assert (large, short) == (payload, b"short")
    # Over max_value_bytes, so it was thrown away, and what follows on the connection is still right.
    assert too_large is None
    assert (await backend.get(SCOPE, [name(2)])).values == [b"short"]
    await backend.close()


async def test_chunks_that_saw_different_generations_settle_on_the_last(valkey: RedisSite) -> None:
    backend = valkey.backend(replace(LIMITS, chunk_keys=1))
    (server,) = valkey.servers
    await backend.ensure_generation(SCOPE, 10)
    keys = [name(i) for i in range(50)]

    async def reset() -> None:
        for _ in range(20):
            await backend.advance_generation(SCOPE, 0)

    async def look() -> None:
        before = int(server.command("GET", f"test:generation:{KEYSPACE.fingerprint}"))
        seen = (await backend.exists(SCOPE, keys)).generation
        assert seen is not None
        assert seen >= before

    await asyncio.gather(reset(), look(), look(), look())
    assert (await backend.exists(SCOPE, keys)).generation == 30
    await backend.close()


async def test_a_server_that_does_not_answer_is_down_in_time(valkey: RedisSite) -> None:
    (server,) = valkey.servers
    backend = valkey.backend(replace(LIMITS, timeout_s=0.2, connections=2, chunk_keys=1))
    await backend.put(SCOPE, [(name(i), b"%d" % i) for i in range(20)])
    server.pause()
    try:
        started_s = asyncio.get_running_loop().time()
        with pytest.raises(BackendDown):
            await backend.get(SCOPE, [name(i) for i in range(20)])
        assert asyncio.get_running_loop().time() - started_s < 1  # not once per chunk
    finally:
        server.resume()
    # The answer that came too late must not be taken for the next one.
    await asyncio.sleep(0.3)
    assert (await backend.get(SCOPE, [name(2)])).values == [b"2"]
    await backend.close()


async def test_a_server_that_trickles_does_not_keep_a_connection_busy() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(b"+OK\r\n")  # to CLIENT SETNAME
            await reader.read(1000)
            writer.write(b"$1000000\r\n")
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.02)

    server = await asyncio.start_server(trickle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    backend = make_backend(f"redis://127.0.0.1:{port}", replace(LIMITS, timeout_s=0.2, connections=1))
    loop = asyncio.get_running_loop()
    for _ in range(3):
        started_s = loop.time()
        with pytest.raises((BackendDown, BackendBusy)):
            await backend.get(SCOPE, [name(1)])
        assert loop.time() - started_s < 1
    await until(lambda: not backend._calls._slots.locked())
    await backend.close()
    server.close()


async def test_a_restarted_server_is_met_on_new_connections(tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path).start()
    backend = make_backend(server.url)
    try:
        await asyncio.gather(*(backend.put(SCOPE, [(name(i), b"value")]) for i in range(4)))
        server.kill()
        server.start()
        assert (await backend.get(SCOPE, [name(1)])).values == [None]
    finally:
        await backend.close()
        server.kill()


async def test_callers_beyond_the_connections_are_told_it_is_busy(valkey: RedisSite) -> None:
    backend = valkey.backend(replace(LIMITS, timeout_s=0.2, connections=1))
    await backend.probe()
    await backend._calls._slots.acquire()
    with pytest.raises(BackendBusy):
        await backend.probe()
    await backend.close()


async def test_a_wrong_password_says_so_and_is_not_repeated(tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path, password="right").start()
    backend = make_backend(server.url.replace("right", "sesame"))
    try:
        with pytest.raises(BackendDown, match="AuthenticationError") as caught:
            await backend.probe()
        assert "sesame" not in str(caught.value)
    finally:
        await backend.close()
        server.kill()


async def test_a_changed_password_file_is_taken_up(tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path, password="before").start()
    path = tmp_path / "password"
    path.write_text("wrong")
    security = RedisSecurity(password_file=str(path))
    backend = make_backend(f"redis://127.0.0.1:{server.port}", security=security)
    try:
        with pytest.raises(BackendDown, match="AuthenticationError"):
            await backend.probe()
        path.write_text("before\n")
        await backend.probe()
        path.unlink()
        server.command("CLIENT", "KILL", "TYPE", "normal")
        with pytest.raises(BackendDown, match="cannot read"):
            await backend.probe()
    finally:
        await backend.close()
        server.kill()


async def test_a_server_that_cannot_be_trusted_is_not_talked_to(tmp_path: Path) -> None:
    with tls_site(tmp_path, server_identity="elsewhere.example") as site:
        (tmp_path / "other").mkdir()
        other = make_tls_files(tmp_path / "other", trustme.CA(), "client", "store")
        for security in (RedisSecurity(tls_ca_file=str(other.ca)), RedisSecurity(**site.security)):
            backend = make_backend(site.url, security=security)
            with pytest.raises(BackendDown, match="CERTIFICATE_VERIFY_FAILED"):
                await backend.probe()
            await backend.close()


async def test_a_server_that_asks_for_a_certificate_gets_none(tmp_path: Path) -> None:
    with tls_site(tmp_path) as site:
        backend = make_backend(site.url, security=RedisSecurity(tls_ca_file=site.security["tls_ca_file"]))
        with pytest.raises(BackendDown, match=r"redis: 127\.0\.0\.1"):
            await backend.probe()
        await backend.close()


async def test_a_full_server_takes_nothing_and_still_answers(tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction").start()
    backend = make_backend(server.url)
    try:
        (policy,) = await backend.memory_policies()
        assert "saves fail" in policy.advice(blocks_expire=True)
        taken = await backend.put(SCOPE, [(name(i), b"x" * 200_000) for i in range(20)])
        assert taken[0]
        assert not taken[-1]
        assert (await backend.exists(SCOPE, [name(0), name(19)])).found == [True, False]
    finally:
        await backend.close()
        server.kill()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([5], [1]),
        ([100], [1]),
        ([4, 4, 4], [2, 1]),
        ([100, 1, 100], [1, 1, 1]),
        ([10, 1], [1, 1]),
        ([0] * 10, [4, 4, 2]),
    ],
)
def test_chunks_hold_at_least_one_value(lengths: list[int], expected: list[int]) -> None:
    places = range(len(lengths))
    chunks = list(by_bytes(places, lengths, 10, 4))
    assert [len(chunk) for chunk in chunks] == expected
    assert [place for chunk in chunks for place in chunk] == list(places)


async def test_a_generation_that_is_no_number_is_no_crash(valkey: RedisSite) -> None:
    backend = valkey.backend()
    (server,) = valkey.servers
    key = f"test:generation:{KEYSPACE.fingerprint}"
    server.command("SET", key, "seven")
    for call in (backend.ensure_generation(SCOPE, 1), backend.advance_generation(SCOPE, 1)):
        with pytest.raises(BackendDown, match=r"number|integer|ExecAbort"):
            await call
    with pytest.raises(BackendDown, match="number"):
        await backend.get(SCOPE, [name(1)])
    server.command("DEL", key)
    server.command("RPUSH", key, "a")
    with pytest.raises(BackendDown, match="must be a number"):
        await backend.ensure_generation(SCOPE, 1)
    await backend.close()
