"""Block values in fewer bytes, for places that are slow or small: lz4 or zstd, told by the value itself.

A compressed value is the worker's header with the codec's number in its codec field, and the compressed
payload behind it. The header still tells the payload's real length, which bounds what is expanded; expanding
gives back the very bytes that the worker made, so its checksum proves the whole. A value that would not
shrink stays as it is. Readers know every codec, whatever they write with.
"""

import struct
from collections.abc import Callable
from enum import IntEnum

import lz4.block
import zstandard

from reprise_store.ports import Value
from reprise_wire.block_codec import CODEC_NONE, HEADER_NBYTES, MAGIC, VERSION

ZSTD_LEVEL = 1
_BEGIN = struct.Struct("<4sHH")
_CODEC = struct.Struct("<H")
_CODEC_OFFSET = 6
_LENGTH = struct.Struct("<Q")
_LENGTH_OFFSET = 40


class Codec(IntEnum):
    """The numbers in the header."""

    NONE = CODEC_NONE
    LZ4 = 1
    ZSTD = 2


class BadValue(Exception):
    """Not to be expanded; `reason` is codec (unknown), length (over the limit) or damaged."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def is_compressed(value: Value) -> bool:
    if len(value) < HEADER_NBYTES:
        return False
    magic, version, codec = _BEGIN.unpack_from(value)
    return bool(magic == MAGIC and version == VERSION and codec != Codec.NONE)


def compress(value: Value, codec: Codec) -> Value:
    """The value itself where it is no block, or would not shrink."""
    if codec is Codec.NONE or len(value) <= HEADER_NBYTES or _BEGIN.unpack_from(value) != _PLAIN:
        return value
    payload = memoryview(value)[HEADER_NBYTES:]
    if codec is Codec.LZ4:
        packed: bytes = lz4.block.compress(payload, store_size=False)
    else:
        packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(payload)
    if len(packed) >= len(payload):
        return value
    header = bytearray(value[:HEADER_NBYTES])
    _CODEC.pack_into(header, _CODEC_OFFSET, codec)
    return bytes(header) + packed


def expand(value: Value, *, max_bytes: int, allocate: Callable[[int], memoryview | None]) -> Value:
    """What the worker made, in memory that `allocate` gives or else of its own. Raises BadValue.

    Never more than `max_bytes` are made, whatever the value says of itself.
    """
    if not is_compressed(value):
        return value
    (codec,) = _CODEC.unpack_from(value, _CODEC_OFFSET)
    (length,) = _LENGTH.unpack_from(value, _LENGTH_OFFSET)
    if codec not in (Codec.LZ4, Codec.ZSTD):
        raise BadValue("codec")
    if not 0 < length <= max_bytes - HEADER_NBYTES:
        raise BadValue("length")
    packed = memoryview(value)[HEADER_NBYTES:]
    payload = _expand_lz4(packed, length) if codec == Codec.LZ4 else _expand_zstd(packed, length)
    if len(payload) != length:
        raise BadValue("damaged")
    room = allocate(HEADER_NBYTES + length)
    whole = room if room is not None else memoryview(bytearray(HEADER_NBYTES + length))
    whole[:HEADER_NBYTES] = value[:HEADER_NBYTES]
    _CODEC.pack_into(whole, _CODEC_OFFSET, Codec.NONE)
    whole[HEADER_NBYTES:] = payload
    return whole


_PLAIN = (MAGIC, VERSION, int(Codec.NONE))


def _expand_lz4(packed: memoryview, length: int) -> bytes:
    try:
        payload: bytes = lz4.block.decompress(packed, uncompressed_size=length)
    except lz4.block.LZ4BlockError as error:
        raise BadValue("damaged") from error
    return payload


def _expand_zstd(packed: memoryview, length: int) -> bytes:
    try:
        # The frame's own length is checked first: it, not ours, would be allocated.
        if zstandard.get_frame_parameters(packed).content_size != length:
            raise BadValue("damaged")
        payload: bytes = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadValue("damaged") from error
    return payload
