"""The header of a block value: its bytes, and what is refused for which reason."""

import struct
from dataclasses import replace

import pytest

from reprise_core.ids import BlockHash
from reprise_wire.block_codec import HEADER_NBYTES, BadBlock, BlockFormat, decode_block, encode_header

HASH = BlockHash(bytes(range(32)))
PAYLOAD = bytes(range(256)) * 4
FORMAT = BlockFormat(b"f" * 16, "bfloat16", 4, 2, 8, 8, 16, len(PAYLOAD))


def value(payload: bytes = PAYLOAD, format: BlockFormat = FORMAT, block_hash: BlockHash = HASH) -> bytes:
    return encode_header(payload, block_hash=block_hash, format=format) + payload


def reason(stored: bytes) -> str:
    with pytest.raises(BadBlock) as caught:
        decode_block(stored, block_hash=HASH, format=FORMAT)
    return caught.value.reason


def test_the_headers_bytes() -> None:
    header = value()[:HEADER_NBYTES]
    fields = struct.pack("<4s8HI16sQQ", b"RKVB", 2, 0, 2, 4, 2, 8, 8, 0, 16, b"f" * 16, len(PAYLOAD), 0)
    assert header[:56] == fields
    assert header[56:].hex() == "87813b05d4a21eb3"


def test_a_value_gives_its_payload_back() -> None:
    assert decode_block(value(), block_hash=HASH, format=FORMAT) == PAYLOAD


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"num_layers": 8},
        {"num_kv_heads": 4},
        {"key_dim": 16},
        {"value_dim": 4},
        {"num_tokens": 32},
        {"fingerprint": b"g" * 16},
    ],
)
def test_another_format_is_foreign(change: dict[str, object]) -> None:
    assert reason(value(format=replace(FORMAT, **change))) == "foreign"  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [0, 4, 6, 50])
def test_other_magic_version_codec_or_reserved_bytes_are_foreign(offset: int) -> None:
    stored = bytearray(value())
    stored[offset] ^= 1
    assert reason(bytes(stored)) == "foreign"


def test_every_other_flipped_bit_is_damage() -> None:
    for position in [*range(56, 64), *range(64, 64 + len(PAYLOAD), 37)]:
        stored = bytearray(value())
        stored[position] ^= 0x10
        assert reason(bytes(stored)) == "damaged", position


@pytest.mark.parametrize("length", [0, 10, 63, 64, 64 + len(PAYLOAD) - 1])
def test_a_cut_value_is_damaged(length: int) -> None:
    assert reason(value()[:length]) == "damaged"


def test_a_longer_value_and_another_blocks_value_are_damaged() -> None:
    assert reason(value() + b"x") == "damaged"
    assert reason(value(block_hash=BlockHash(b"z" * 32))) == "damaged"


def test_a_foreign_field_is_named_with_both_values() -> None:
    with pytest.raises(BadBlock, match="num_layers: 4, must be 5"):
        decode_block(value(), block_hash=HASH, format=replace(FORMAT, num_layers=5))
