"""Stores that compress differently share one Redis: each reads every value, and workers see none of it."""

import struct
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from reprise_wire.block_codec import HEADER_NBYTES, BlockFormat, decode_block, encode_header
from reprise_wire.block_transfer import redis_key
from support.redis_sites import RedisSite, unix_site
from support.store_harness import KEYSPACE, RunningStore, block_hashes, keys_of, running_store

PAYLOAD = b"a block that repeats itself. " * 2000
FORMAT = BlockFormat(b"f" * 16, "float32", 2, 2, 8, 8, 16, len(PAYLOAD))
HASHES = block_hashes(3)
CODECS = ("none", "lz4", "zstd")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[RedisSite]:
    with unix_site(tmp_path) as site:
        yield site


def value(number: int) -> bytes:
    header = encode_header(PAYLOAD, block_hash=HASHES[number], format=FORMAT)
    return bytes(header) + PAYLOAD


def stored_key(generation: int, number: int) -> str:
    return redis_key(KEYSPACE, generation, keys_of(HASHES)[number])


async def save(store: RunningStore, number: int) -> int:
    generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
    await store.peer.save(generation, keys_of(HASHES[number : number + 1]), [value(number)])
    await store.settled()
    return generation


async def test_each_reads_what_the_others_wrote(site: RedisSite) -> None:
    async with AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(running_store(**site.settings(), codec=codec, capacity_bytes=0))
            for codec in CODECS
        ]
        generations = {await save(store, number) for number, store in enumerate(stores)}
        (generation,) = generations
        lengths = [site.servers[0].command("STRLEN", stored_key(generation, i)) for i in range(3)]
        assert lengths[0] == len(value(0))
        assert max(lengths[1:]) < len(value(0)) / 10
        for store in stores:
            _, values = await store.peer.load(generation, keys_of(HASHES))
            for number, got in enumerate(values):
                assert got == value(number)
                assert decode_block(got, block_hash=HASHES[number], format=FORMAT) == PAYLOAD
        assert stores[0].metric("codec_bytes_total", form="plain") == 0
        for store, length in zip(stores[1:], lengths[1:], strict=True):
            assert store.metric("codec_bytes_total", form="plain") == len(value(0))
            assert store.metric("codec_bytes_total", form="stored") == length


async def test_host_memory_stays_uncompressed(site: RedisSite) -> None:
    async with running_store(**site.settings(), codec="zstd") as one:
        generation = await save(one, 0)
        assert (await one.client.stats()).host_bytes == len(value(0))
        async with running_store(**site.settings()) as two:
            await two.peer.load(generation, keys_of(HASHES[:1]))
            assert (await two.client.stats()).host_bytes == len(value(0))


@pytest.mark.parametrize(
    ("offset", "field", "reason"),
    [
        (6, b"\x63\x00", "codec"),
        (40, struct.pack("<Q", 1 << 40), "length"),
        (HEADER_NBYTES, b"xx", "damaged"),
    ],
)
async def test_what_cannot_be_expanded_is_missing_and_mended_by_a_save(
    site: RedisSite, offset: int, field: bytes, reason: str
) -> None:
    async with running_store(**site.settings(), codec="lz4", capacity_bytes=0) as store:
        generation = await save(store, 0)
        site.servers[0].command("SETRANGE", stored_key(generation, 0), offset, field)
        _, values = await store.peer.load(generation, keys_of(HASHES[:1]))
        assert values == [b""]
        assert store.metric("values_refused_total", reason=reason) == 1
        await save(store, 0)
        _, values = await store.peer.load(generation, keys_of(HASHES[:1]))
        assert values == [value(0)]
