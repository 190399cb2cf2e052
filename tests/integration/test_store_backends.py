"""One suite for every place that keeps blocks: host memory, and Redis over a real Valkey."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from reprise_core.ids import BlockHash
from reprise_store.adapters.redis_backend import RedisBackend, RedisLimits, chunks_by_bytes
from reprise_store.keys import Scope, scope_of
from reprise_store.memory_backend import MemoryBackend
from reprise_store.ports import Backend, BackendBusy, BackendDown
from reprise_wire.block_transfer import BlockKey, Keyspace, redis_key
from support.valkey_server import ValkeyProcess

KEYSPACE = Keyspace("test", "ab" * 16)
OTHER = Keyspace("test", "cd" * 16)
SCOPE = scope_of(KEYSPACE)
LIMITS = RedisLimits(timeout_s=2.0, connections=4, chunk_bytes=64 * 1024, chunk_keys=7, ttl_s=0)


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


class TestRedisBackend(BackendContract):
    @pytest.fixture
    async def backend(self, valkey: ValkeyProcess) -> AsyncIterator[RedisBackend]:
        backend = RedisBackend(valkey.url, LIMITS)
        yield backend
        await backend.close()


class TestRedisBackendWithExpiry(BackendContract):
    @pytest.fixture
    async def backend(self, valkey: ValkeyProcess) -> AsyncIterator[RedisBackend]:
        limits = RedisLimits(timeout_s=2.0, connections=4, chunk_bytes=64 * 1024, chunk_keys=7, ttl_s=60)
        backend = RedisBackend(valkey.url, limits)
        yield backend
        await backend.close()

    async def test_a_load_starts_the_expiry_again(self, backend: RedisBackend) -> None:
        await backend.put(SCOPE, [(name(1), b"value")])
        client = backend._client
        assert 59_000 < await client.pttl(name(1)) <= 60_000
        await client.pexpire(name(1), 1000)
        await backend.get(SCOPE, [name(1)])
        assert await client.pttl(name(1)) > 59_000


@pytest.fixture(scope="module")
def unix_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    server = ValkeyProcess(tmp_path_factory.mktemp("valkey"), unix=True).start()
    yield server
    server.kill()


@pytest.fixture
async def valkey(unix_valkey: ValkeyProcess) -> ValkeyProcess:
    backend = RedisBackend(unix_valkey.url, LIMITS)
    await backend._client.flushall()
    await backend.close()
    return unix_valkey


async def test_one_value_per_block_under_the_documented_key(valkey: ValkeyProcess) -> None:
    backend = RedisBackend(valkey.url, LIMITS)
    keyspace = Keyspace("ns", "12" * 16, adapter="feedbeef", tp_size=2)
    await backend.put(
        scope_of(keyspace), [(redis_key(keyspace, 8, BlockKey(1, 3, BlockHash(b"h" * 16))), b"v")]
    )
    await backend.ensure_generation(Scope("ns", "12" * 16), 8)
    keys = sorted(await backend._client.keys("*"))
    assert keys == [
        b"ns:8:" + b"12" * 16 + b":feedbeef:2:1:3:" + b"68" * 16,
        b"ns:generation:" + b"12" * 16,
    ]
    await backend.close()


async def test_a_server_that_does_not_answer_is_down_in_time(valkey: ValkeyProcess) -> None:
    limits = RedisLimits(timeout_s=0.2, connections=2, chunk_bytes=1024, chunk_keys=16, ttl_s=0)
    backend = RedisBackend(valkey.url, limits)
    await backend.put(SCOPE, [(name(1), b"one"), (name(2), b"two")])
    valkey.pause()
    try:
        started_s = asyncio.get_running_loop().time()
        with pytest.raises(BackendDown):
            await backend.get(SCOPE, [name(1)])
        assert asyncio.get_running_loop().time() - started_s < 1
    finally:
        valkey.resume()
    # The answer that came too late must not be taken for the next one.
    assert (await backend.get(SCOPE, [name(2)])).values == [b"two"]
    await backend.close()


async def test_callers_beyond_the_connections_are_told_it_is_busy(valkey: ValkeyProcess) -> None:
    limits = RedisLimits(timeout_s=0.2, connections=1, chunk_bytes=1024, chunk_keys=16, ttl_s=0)
    backend = RedisBackend(valkey.url, limits)
    await backend.ping()
    await backend._slots.acquire()
    with pytest.raises(BackendBusy):
        await backend.ping()
    await backend.close()


async def test_a_wrong_password_says_so_and_is_not_repeated(tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path, password="right").start()
    backend = RedisBackend(server.url.replace("right", "sesame"), LIMITS)
    try:
        with pytest.raises(BackendDown, match="AuthenticationError") as caught:
            await backend.ping()
        assert "sesame" not in str(caught.value)
    finally:
        await backend.close()
        server.kill()


async def test_a_full_server_takes_nothing_and_still_answers(tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction").start()
    backend = RedisBackend(server.url, LIMITS)
    try:
        policy = await backend.memory_policy()
        assert "allkeys-lru" in policy.advice
        taken = await backend.put(SCOPE, [(name(i), b"x" * 200_000) for i in range(20)])
        assert taken[0]
        assert not taken[-1]
        assert (await backend.exists(SCOPE, [name(0), name(19)])).found == [True, False]
    finally:
        await backend.close()
        server.kill()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([], []), ([5], [1]), ([100], [1]), ([4, 4, 4], [2, 1]), ([100, 1, 100], [1, 1, 1]), ([10, 1], [1, 1])],
)
def test_chunks_hold_at_least_one_value(lengths: list[int], expected: list[int]) -> None:
    items = [(str(i), b"x" * length) for i, length in enumerate(lengths)]
    chunks = list(chunks_by_bytes(items, 10))
    assert [len(chunk) for chunk in chunks] == expected
    assert [item for chunk in chunks for item in chunk] == items
