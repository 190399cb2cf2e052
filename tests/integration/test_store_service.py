"""The store as scheduler and worker see it: gRPC, ZMQ, and a real Valkey behind."""

import asyncio
import hashlib
from collections.abc import Iterator

import msgspec
import pytest
import redis.asyncio as aioredis

from reprise_core.errors import ErrorKind
from reprise_core.ids import BlockHash
from reprise_wire.block_codec import BadBlock, BlockFormat, decode_block, encode_header
from reprise_wire.block_transfer import TRANSFER_VERSION, Keyspace, TransferKind, encode_transfer, redis_key
from reprise_wire.error_codec import PeerError
from reprise_wire.store_codec import StoreTier
from support.store_harness import KEYSPACE, Way, block_hash, block_hashes, keys_of, running_store
from support.valkey_server import ValkeyProcess
from support.waiting import until

HOST, EXTERNAL = StoreTier.HOST, StoreTier.EXTERNAL


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    server = ValkeyProcess(tmp_path_factory.mktemp("valkey"), unix=True).start()
    yield server
    server.kill()


@pytest.fixture(autouse=True, params=["messages", "memory"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every story here is told twice: values in messages, and in shared memory."""
    monkeypatch.setattr(Way, "shares_memory", request.param == "memory")
    return str(request.param)


@pytest.fixture
def keyspace(request: pytest.FixtureRequest) -> Keyspace:
    """One of its own per test; they share the server."""
    return Keyspace(hashlib.blake2b(request.node.name.encode(), digest_size=8).hexdigest(), "ab" * 16)


async def test_memory_alone_saves_finds_and_loads() -> None:
    async with running_store() as store:
        hashes = block_hashes(4)
        generation = (await store.client.lookup(KEYSPACE, [0], hashes)).generation
        saved = await store.peer.save(generation, keys_of(hashes[:3]), [b"a", b"b" * 100_000, b"c"])
        assert saved.kind == TransferKind.SAVED
        assert saved.accepted == (True, True, True)
        lookup = await store.client.lookup(KEYSPACE, [0], hashes)
        assert lookup.tiers == (HOST,) * 3
        assert lookup.generation == generation
        loaded, values = await store.peer.load(generation, keys_of(hashes))
        assert loaded.kind == TransferKind.LOADED
        assert values == [b"a", b"b" * 100_000, b"c", b""]
        stats = await store.client.stats()
        assert (stats.host_blocks, stats.host_bytes, stats.redis_connected) == (3, 100_002, False)
        assert (stats.loads, stats.saves, stats.dropped_saves) == (4, 3, 0)


async def test_a_lookup_stops_at_the_first_miss() -> None:
    async with running_store() as store:
        hashes = block_hashes(5)
        generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
        await store.peer.save(generation, keys_of([hashes[0], hashes[1], hashes[3]]), [b"v"] * 3)
        assert len((await store.client.lookup(KEYSPACE, [0], hashes)).tiers) == 2
        assert (await store.client.lookup(KEYSPACE, [0], hashes[2:])).tiers == ()


async def test_a_block_counts_when_every_rank_and_group_has_it(
    server: ValkeyProcess, keyspace: Keyspace
) -> None:
    keyspace = Keyspace(keyspace.namespace, keyspace.fingerprint, tp_size=2)
    async with running_store(redis_url=server.url, redis_chunk_keys=6) as store:
        hashes = block_hashes(10)
        generation = (await store.client.lookup(keyspace, [0, 1], hashes)).generation
        parts = [(rank, group_id) for rank in (0, 1) for group_id in (0, 1)]
        for rank, group_id in parts:
            kept = hashes if (rank, group_id) != (1, 1) else hashes[:7]
            await store.peer.save(generation, keys_of(kept, rank, group_id), [b"v"] * len(kept), keyspace)
        assert len((await store.client.lookup(keyspace, [0, 1], hashes)).tiers) == 7
        assert len((await store.client.lookup(keyspace, [0], hashes)).tiers) == 10
        await store.settled()
    async with running_store(redis_url=server.url, redis_chunk_keys=6) as cold:
        assert (await cold.client.lookup(keyspace, [0, 1], hashes)).tiers == (EXTERNAL,) * 7


async def test_what_one_store_saved_another_loads_through_redis(
    server: ValkeyProcess, keyspace: Keyspace
) -> None:
    hashes = block_hashes(40)
    values = [bytes([i]) * 50_000 for i in range(40)]
    async with running_store(redis_url=server.url) as writer:
        generation = (await writer.client.lookup(keyspace, [0], hashes)).generation
        saved = await writer.peer.save(generation, keys_of(hashes), values, keyspace)
        assert all(saved.accepted)
        await writer.settled()
        assert writer.metric("saves_total", tier="external", outcome="written") == 40
    async with running_store(redis_url=server.url) as reader:
        lookup = await reader.client.lookup(keyspace, [0], hashes)
        assert lookup.tiers == (EXTERNAL,) * 40
        assert lookup.generation == generation
        _, got = await reader.peer.load(generation, keys_of(hashes), keyspace)
        assert got == values
        # Loaded blocks now lie in the host tier too.
        assert (await reader.client.lookup(keyspace, [0], hashes)).tiers == (HOST,) * 40


async def test_no_host_tier(server: ValkeyProcess, keyspace: Keyspace) -> None:
    async with running_store(redis_url=server.url, capacity_bytes=0) as store:
        hashes = block_hashes(3)
        generation = (await store.client.lookup(keyspace, [0], hashes)).generation
        saved = await store.peer.save(generation, keys_of(hashes), [b"v"] * 3, keyspace)
        assert saved.accepted == (True,) * 3
        await store.settled()
        assert (await store.client.lookup(keyspace, [0], hashes)).tiers == (EXTERNAL,) * 3
        _, values = await store.peer.load(generation, keys_of(hashes), keyspace)
        assert values == [b"v"] * 3
        assert (await store.client.stats()).host_blocks == 0


async def test_the_host_tier_stays_within_its_bytes_and_drops_the_oldest() -> None:
    async with running_store(capacity_bytes=10_000) as store:
        generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
        for number in range(20):
            await store.peer.save(generation, keys_of([block_hash(number)]), [b"x" * 1000])
        stats = await store.client.stats()
        assert stats.host_bytes == 10_000
        assert store.metric("host_evictions_total") == 10
        assert (await store.client.lookup(KEYSPACE, [0], [block_hash(9)])).tiers == ()
        assert (await store.client.lookup(KEYSPACE, [0], [block_hash(10)])).tiers == (HOST,)
        saved = await store.peer.save(generation, keys_of([block_hash(99)]), [b"x" * 10_001])
        assert saved.accepted == (False,)


async def test_reset_reaches_every_store_and_spares_other_models(
    server: ValkeyProcess, keyspace: Keyspace
) -> None:
    other = Keyspace(keyspace.namespace, "cd" * 16)
    hashes = block_hashes(8)
    async with (
        running_store(redis_url=server.url) as one,
        running_store(redis_url=server.url) as two,
    ):
        generation = (await one.client.lookup(keyspace, [0], hashes)).generation
        others = (await one.client.lookup(other, [0], hashes)).generation
        await one.peer.save(generation, keys_of(hashes), [b"v"] * 8, keyspace)
        await one.peer.save(others, keys_of(hashes), [b"o"] * 8, other)
        await one.settled()
        await two.peer.load(generation, keys_of(hashes), keyspace)

        assert await one.client.reset(keyspace) == generation + 1

        # The warm one has the blocks in host memory still, and must not serve them.
        refused, _ = await two.peer.load(generation, keys_of(hashes), keyspace)
        assert (refused.kind, refused.reason) == (TransferKind.REFUSED, "generation")
        for store in (one, two):
            after = await store.client.lookup(keyspace, [0], hashes)
            assert (after.tiers, after.generation) == ((), generation + 1)
            refused = await store.peer.save(generation, keys_of(hashes), [b"v"] * 8, keyspace)
            assert (refused.kind, refused.reason) == (TransferKind.REFUSED, "generation")
            assert len((await store.client.lookup(other, [0], hashes)).tiers) == 8
        assert two.metric("host_blocks") == 0 or (await two.client.stats()).host_blocks == 0
        await until(lambda: one.metric("swept_blocks_total") >= 8)
        assert len((await two.client.lookup(other, [0], hashes)).tiers) == 8


async def test_reset_on_memory_alone() -> None:
    async with running_store() as store:
        hashes = block_hashes(3)
        generation = (await store.client.lookup(KEYSPACE, [0], hashes)).generation
        await store.peer.save(generation, keys_of(hashes), [b"v"] * 3)
        assert await store.client.reset(KEYSPACE) == generation + 1
        assert (await store.client.lookup(KEYSPACE, [0], hashes)).tiers == ()
        assert (await store.client.stats()).host_bytes == 0


async def test_a_save_queue_that_is_full_drops_and_counts(server: ValkeyProcess, keyspace: Keyspace) -> None:
    async with running_store(redis_url=server.url, save_queue_blocks=2) as store:
        generation = (await store.client.lookup(keyspace, [0], [])).generation
        saved = await store.peer.save(generation, keys_of(block_hashes(10)), [b"v"] * 10, keyspace)
        # All in host memory; two on their way to Redis.
        assert saved.accepted == (True,) * 10
        assert (await store.client.stats()).dropped_saves == 8
        assert store.metric("saves_dropped_total", reason="queue_full") == 8
        await store.settled()
        assert store.metric("saves_total", tier="external", outcome="written") == 2


async def test_values_pass_opaque_and_bad_ones_are_refused_by_their_reader(
    server: ValkeyProcess, keyspace: Keyspace
) -> None:
    """Truncated, flipped or foreign in Redis: the store hands out what is there, `decode_block` refuses."""
    hashes, payload = block_hashes(3), b"payload" * 1000
    wanted = BlockFormat(bytes.fromhex(keyspace.fingerprint), "float32", 1, 1, 8, 8, 16, len(payload))
    values = [encode_header(payload, block_hash=digest, format=wanted) + payload for digest in hashes]

    def decode(value: bytes, digest: BlockHash) -> bytes:
        return bytes(decode_block(value, block_hash=digest, format=wanted))

    async with running_store(redis_url=server.url) as writer:
        generation = (await writer.client.lookup(keyspace, [0], hashes)).generation
        await writer.peer.save(generation, keys_of(hashes), values, keyspace)
        await writer.settled()
        redis = aioredis.from_url(server.url)
        names = [redis_key(keyspace, generation, key) for key in keys_of(hashes)]
        # One key per block, nothing beside it that could be lost alone.
        assert sorted(await redis.keys(f"{keyspace.namespace}:{generation}:*")) == sorted(
            name.encode() for name in names
        )
        await redis.set(names[0], values[0][:-1])
        await redis.setrange(names[1], 500, b"?")
        await redis.set(names[2], values[0])
        await redis.aclose()
    async with running_store(redis_url=server.url) as reader:
        _, got = await reader.peer.load(generation, keys_of(hashes), keyspace)
        reasons = []
        for value, digest in zip(got, hashes, strict=True):
            with pytest.raises(BadBlock) as caught:
                decode(value, digest)
            reasons.append(caught.value.reason)
        assert reasons == ["damaged"] * 3
        # The worker recomputes and saves again, which mends every tier.
        await reader.peer.save(generation, keys_of(hashes), values, keyspace)
        await reader.settled()
        _, got = await reader.peer.load(generation, keys_of(hashes), keyspace)
        assert [decode(value, digest) for value, digest in zip(got, hashes, strict=True)] == [payload] * 3
    async with running_store(redis_url=server.url) as cold:
        _, got = await cold.peer.load(generation, keys_of(hashes), keyspace)
        assert got == values


async def test_blocks_gone_between_lookup_and_load_come_back_empty(
    server: ValkeyProcess, keyspace: Keyspace
) -> None:
    hashes = block_hashes(6)
    async with running_store(redis_url=server.url, capacity_bytes=0) as store:
        generation = (await store.client.lookup(keyspace, [0], hashes)).generation
        await store.peer.save(generation, keys_of(hashes), [b"v"] * 6, keyspace)
        await store.settled()
        assert len((await store.client.lookup(keyspace, [0], hashes)).tiers) == 6
        redis = aioredis.from_url(server.url)
        await redis.delete(*(redis_key(keyspace, generation, key) for key in keys_of(hashes)[::2]))
        await redis.aclose()
        _, values = await store.peer.load(generation, keys_of(hashes), keyspace)
        assert values == [b"", b"v"] * 3
        assert store.metric("loads_total", tier="external", outcome="miss") == 3


async def test_a_lost_generation_revives_nothing(server: ValkeyProcess, keyspace: Keyspace) -> None:
    hashes = block_hashes(2)
    async with running_store(redis_url=server.url) as store:
        generation = (await store.client.lookup(keyspace, [0], hashes)).generation
        await store.peer.save(generation, keys_of(hashes), [b"v"] * 2, keyspace)
        await store.settled()
        async with aioredis.from_url(server.url) as redis:
            await redis.delete(f"{keyspace.namespace}:generation:{keyspace.fingerprint}")
        after = await store.client.lookup(keyspace, [0], hashes)
        assert after.tiers == ()
        assert after.generation != generation


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"namespace": "a:b"}, "keyspace.namespace"),
        ({"namespace": ""}, "keyspace.namespace"),
        ({"namespace": "x*"}, "keyspace.namespace"),
        ({"fingerprint": "AB" * 16}, "keyspace.fingerprint"),
        ({"fingerprint": "ab"}, "keyspace.fingerprint"),
        ({"adapter": "../x"}, "keyspace.adapter"),
        ({"tp_size": 0}, "keyspace.tp_size"),
    ],
)
async def test_bad_keyspaces_are_refused_by_name(change: dict[str, object], field: str) -> None:
    keyspace = msgspec.structs.replace(KEYSPACE, **change)
    async with running_store() as store:
        with pytest.raises(PeerError, match=field) as caught:
            await store.client.lookup(keyspace, [0], block_hashes(1))
        assert caught.value.kind is ErrorKind.INVALID
        with pytest.raises(PeerError, match=field):
            await store.client.reset(keyspace)
        refused, _ = await store.peer.load(1, keys_of(block_hashes(1)), keyspace)
        assert (refused.kind, refused.reason) == (TransferKind.REFUSED, "malformed")


async def test_bad_lookups_are_refused_by_name() -> None:
    async with running_store(max_lookup_blocks=4) as store:
        for group_ids, hashes, field in (
            ([], block_hashes(1), "group_ids"),
            ([0], [BlockHash(b"short")], r"block_hashes\[0\]"),
            ([0], block_hashes(5), "5 hashes, at most 4"),
        ):
            with pytest.raises(PeerError, match=field) as caught:
                await store.client.lookup(KEYSPACE, group_ids, hashes)
            assert caught.value.kind is ErrorKind.INVALID


async def test_malformed_frames_are_counted_and_end_nothing() -> None:
    async with running_store(max_transfer_blocks=4) as store:
        garbage: list[list[bytes]] = [
            [b""],
            [b"\xc1 no msgpack"],
            [msgspec.msgpack.encode({"a": 1})],
            [msgspec.msgpack.encode([1, "save"])],
            [b"\x00" * 100_000, b"x"],
        ]
        for frames in garbage:
            await store.peer.socket.send_multipart(frames)
        hashes = block_hashes(5)
        generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
        for kind, keys, values in (
            (TransferKind.SAVE, keys_of(hashes[:2]), [b"only one"]),
            (TransferKind.LOAD, keys_of(hashes), []),
            (TransferKind.LOAD, keys_of(hashes[:1], rank=1), []),
            (TransferKind.LOAD, keys_of([BlockHash(b"odd")]), []),
            (TransferKind.SAVED, (), []),
        ):
            refused, _ = await store.peer.ask(kind, generation, keys, values)
            assert (refused.kind, refused.reason) == (TransferKind.REFUSED, "malformed")
        refused, _ = await store.peer.ask(TransferKind.LOAD, generation, keys_of(hashes[:1]), version=99)
        assert (refused.kind, refused.reason) == (TransferKind.REFUSED, "version")
        assert store.metric("malformed_total") == len(garbage) + 5
        assert (await store.peer.save(generation, keys_of(hashes[:1]), [b"v"])).accepted == (True,)
        assert (await store.peer.save(generation, keys_of(hashes[:1]), [b""])).accepted == (False,)


async def test_loads_beyond_the_queue_are_refused_and_the_rest_answered() -> None:
    async with running_store(load_queue_requests=3, load_concurrency=1) as store:
        generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
        slots = store.app._blocks._load_slots
        await slots.acquire()
        for transfer_id in range(5):
            header = [TRANSFER_VERSION, "load", transfer_id, KEYSPACE, generation, keys_of(block_hashes(1))]
            await store.peer.socket.send(msgspec.msgpack.encode(header))
        refused = [(await store.peer.receive())[0] for _ in range(2)]
        assert [answer.reason for answer in refused] == ["unavailable"] * 2
        assert store.metric("loads_waiting") == 3
        slots.release()
        loaded = [(await store.peer.receive())[0].transfer_id for _ in range(3)]
        assert loaded == [0, 1, 2]


async def test_four_writers_and_a_reader_on_the_same_keys(server: ValkeyProcess, keyspace: Keyspace) -> None:
    hashes = block_hashes(4)
    versions = [bytes([65 + i]) * 100_000 for i in range(4)]
    async with (
        running_store(redis_url=server.url, capacity_bytes=0) as one,
        running_store(redis_url=server.url, capacity_bytes=0) as two,
    ):
        generation = (await one.client.lookup(keyspace, [0], [])).generation

        async def write(store: object, numbers: tuple[int, int]) -> None:
            for number in numbers * 5:
                await store.peer.save(generation, keys_of(hashes), [versions[number]] * 4, keyspace)  # type: ignore[attr-defined]

        await asyncio.gather(write(one, (0, 1)), write(two, (2, 3)))
        await one.settled()
        await two.settled()
        _, values = await one.peer.load(generation, keys_of(hashes), keyspace)
        assert all(value in versions for value in values)


def test_the_header_is_small() -> None:
    """A load of 128 blocks costs a few kilobytes beside its values."""
    from reprise_wire.block_transfer import TransferHeader

    header = TransferHeader(1, "load", 1, KEYSPACE, 2**48, keys_of(block_hashes(128)))
    assert len(encode_transfer(header)) < 128 * 40 + 200
