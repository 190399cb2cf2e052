"""Values in fewer bytes give back the very bytes, and nothing that a value says of itself is believed."""

import contextlib
import random
import struct
from dataclasses import replace

import lz4.block
import pytest
import zstandard

from reprise_core.ids import BlockHash
from reprise_store.value_codec import BadValue, Codec, Value, compress, expand, is_compressed
from reprise_wire.block_codec import HEADER_NBYTES, BlockFormat, decode_block, encode_header

BLOCK = BlockHash(b"h" * 32)
LIMIT_BYTES = 1_000_000
CODECS = (Codec.LZ4, Codec.ZSTD)
PAYLOAD = bytes(range(100)) * 1000
FORMAT = BlockFormat(b"f" * 16, "float32", 2, 2, 8, 8, 16, len(PAYLOAD))


def value_of(payload: bytes) -> bytes:
    block_format = replace(FORMAT, payload_nbytes=len(payload))
    return bytes(encode_header(payload, block_hash=BLOCK, format=block_format)) + payload


def expanded(value: Value, max_bytes: int = LIMIT_BYTES) -> Value:
    return expand(value, max_bytes=max_bytes, allocate=lambda nbytes: None)


@pytest.mark.parametrize("codec", CODECS)
def test_the_very_bytes_come_back(codec: Codec) -> None:
    value = value_of(PAYLOAD)
    packed = compress(memoryview(bytearray(value)), codec)
    assert is_compressed(packed)
    assert len(packed) < len(value) / 5
    for form in (packed, memoryview(packed)):
        back = expanded(form)
        assert back == value
        assert decode_block(back, block_hash=BLOCK, format=FORMAT) == PAYLOAD


@pytest.mark.parametrize("codec", CODECS)
def test_it_is_expanded_where_it_is_wanted(codec: Codec) -> None:
    room = bytearray(HEADER_NBYTES + len(PAYLOAD))
    back = expand(
        compress(value_of(PAYLOAD), codec),
        max_bytes=LIMIT_BYTES,
        allocate=lambda nbytes: memoryview(room)[:nbytes],
    )
    assert room == value_of(PAYLOAD)
    assert isinstance(back, memoryview)
    assert back.obj is room


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "value",
    [b"", b"no block", b"x" * 1000, value_of(b""), value_of(random.Random(1).randbytes(5000))],
    ids=["empty", "short", "foreign", "without payload", "noise"],
)
def test_what_does_not_shrink_stays_as_it_is(codec: Codec, value: bytes) -> None:
    assert compress(value, codec) is value
    assert expanded(value) is value


@pytest.mark.parametrize("codec", CODECS)
def test_bombs_are_refused_before_anything_is_made(codec: Codec) -> None:
    value = value_of(bytes(2 * LIMIT_BYTES))
    packed = compress(value, codec)
    assert len(packed) < 20_000
    assert refusal(packed) == "length"
    # The header says little, the payload has much.
    lying = bytearray(packed)
    struct.pack_into("<Q", lying, 40, 1000)
    assert refusal(lying) == "damaged"
    assert expanded(packed, max_bytes=len(value)) == value
    assert refusal(packed, max_bytes=len(value) - 1) == "length"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("length", [0, 1, len(PAYLOAD) - 1, len(PAYLOAD) + 1])
def test_another_length_than_the_header_says(codec: Codec, length: int) -> None:
    packed = bytearray(compress(value_of(PAYLOAD), codec))
    struct.pack_into("<Q", packed, 40, length)
    assert refusal(packed) == ("length" if not length else "damaged")


@pytest.mark.parametrize("codec", CODECS)
def test_damage(codec: Codec) -> None:
    packed = compress(value_of(PAYLOAD), codec)
    for broken in (packed[:-1], packed[: HEADER_NBYTES + 5], packed[:HEADER_NBYTES], bytes(packed) + b"more"):
        assert refusal(broken) == "damaged"
    seed = 7
    rng = random.Random(seed)
    for _ in range(300):
        broken_bytes = bytearray(packed)
        broken_bytes[rng.randrange(HEADER_NBYTES, len(packed))] ^= 1 << rng.randrange(8)
        with contextlib.suppress(BadValue):
            # As long as it says; the worker's checksum tells the rest.
            assert len(expanded(bytes(broken_bytes))) == HEADER_NBYTES + len(PAYLOAD), seed


def test_an_unknown_codec() -> None:
    value = bytearray(compress(value_of(PAYLOAD), Codec.LZ4))
    struct.pack_into("<H", value, 6, 77)
    assert refusal(value) == "codec"


def test_a_zstd_frame_without_its_length() -> None:
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(PAYLOAD)
    header = bytearray(value_of(PAYLOAD)[:HEADER_NBYTES])
    struct.pack_into("<H", header, 6, Codec.ZSTD)
    assert refusal(bytes(header) + packed) == "damaged"


def test_the_forms_that_others_may_have_written() -> None:
    """Recorded once: the numbers and the layout may not change."""
    header = value_of(PAYLOAD)[:HEADER_NBYTES]
    by_lz4 = header[:6] + b"\x01\x00" + header[8:] + lz4.block.compress(PAYLOAD, store_size=False)
    by_zstd = header[:6] + b"\x02\x00" + header[8:] + zstandard.ZstdCompressor(level=9).compress(PAYLOAD)
    assert expanded(by_lz4) == expanded(by_zstd) == value_of(PAYLOAD)


def refusal(value: Value | bytearray, max_bytes: int = LIMIT_BYTES) -> str:
    with pytest.raises(BadValue) as caught:
        expanded(bytes(value), max_bytes)
    return caught.value.reason
