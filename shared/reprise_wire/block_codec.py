"""One KV block as one value: a header and the payload, checked end to end.

The worker that saves a block encodes it and the worker that loads it decodes it; stores never look inside.
Who stores a value in fewer bytes (`codec`) gives back the very bytes that the worker made. Layout,
little-endian:

    0  4s  magic "RKVB"
    4  u16 version (2)
    6  u16 codec of the payload as stored (0 = as it is; the only one that a worker writes and reads)
    8  u16 dtype of the elements (DTYPE_CODES)
   10  u16 layers
   12  u16 key and value heads of a layer  \\
   14  u16 elements of a key per head       } 0 where the layers differ (the fingerprint tells them apart)
   16  u16 elements of a value per head    /
   18  u16 0
   20  u32 tokens
   24 16s  model fingerprint; of an adapter's block a digest of that and of the adapter's content
   40  u64 payload length in bytes, before any codec
   48  u64 0
   56  u64 XXH3-64 of the block hash, the first 56 header bytes (with codec 0) and the payload
   64      payload: per layer K as [head, token, element], then V

The block hash goes into the checksum, so a value stored under another block's key is refused too.
"""

import struct
from dataclasses import dataclass
from functools import cached_property

import xxhash

from reprise_core.errors import DataLoss
from reprise_core.ids import BlockHash

MAGIC = b"RKVB"
VERSION = 2
CODEC_NONE = 0
DTYPE_CODES = {"float32": 1, "bfloat16": 2, "float16": 3, "float8_e4m3fn": 4}
"""float8_e4m3fn: the payload begins with one float32 scale per layer for K and one for V."""
_FIELDS = struct.Struct("<4sHHHHHHHHI16sQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_NBYTES = _FIELDS.size + _CHECKSUM.size
assert HEADER_NBYTES == 64

Buffer = bytes | bytearray | memoryview


class BadBlock(DataLoss):
    """A value that must not be served; `reason` is missing, damaged or foreign."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class BlockFormat:
    """What all blocks of one worker have in common; a value of another format is foreign.

    `num_kv_heads`, `key_dim` and `value_dim` are 0 where the layers differ.
    """

    fingerprint: bytes
    dtype: str
    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    num_tokens: int
    payload_nbytes: int

    @cached_property
    def fields(self) -> bytes:
        """The header up to its checksum."""
        shape = (self.num_layers, self.num_kv_heads, self.key_dim, self.value_dim)
        return _FIELDS.pack(
            MAGIC,
            VERSION,
            CODEC_NONE,
            DTYPE_CODES[self.dtype],
            *shape,
            0,
            self.num_tokens,
            self.fingerprint,
            self.payload_nbytes,
            0,
        )


def encode_header(payload: Buffer, *, block_hash: BlockHash, format: BlockFormat) -> bytes:
    """The header that stands before `payload`; the two may travel as separate frames."""
    assert len(payload) == format.payload_nbytes
    fields = format.fields
    return fields + _CHECKSUM.pack(_checksum(block_hash, fields, payload))


def decode_block(value: Buffer, *, block_hash: BlockHash, format: BlockFormat) -> memoryview:
    """The payload of a stored value, or BadBlock."""
    view = memoryview(value)
    check_header(view[:HEADER_NBYTES], format=format, value_nbytes=len(view))
    payload = view[HEADER_NBYTES:]
    check_payload(view[:HEADER_NBYTES], payload, block_hash=block_hash)
    return payload


def check_header(header: Buffer, *, format: BlockFormat, value_nbytes: int) -> None:
    """Raises BadBlock unless this is the header of a block of this format, `value_nbytes` long in all."""
    if len(header) < HEADER_NBYTES:
        raise BadBlock("damaged", f"block value of {value_nbytes} bytes is shorter than its header")
    fields = header[: _FIELDS.size]
    if fields != format.fields:
        raise BadBlock("foreign", f"block header differs in {_first_difference(fields, format.fields)}")
    if value_nbytes != HEADER_NBYTES + format.payload_nbytes:
        wanted = HEADER_NBYTES + format.payload_nbytes
        raise BadBlock("damaged", f"block value has {value_nbytes} bytes, must have {wanted}")


def check_payload(header: Buffer, payload: Buffer, *, block_hash: BlockHash) -> None:
    """Raises BadBlock unless the payload is the one that this header was made for, under this hash."""
    if header[_FIELDS.size :] != _CHECKSUM.pack(_checksum(block_hash, header[: _FIELDS.size], payload)):
        raise BadBlock("damaged", "block checksum does not match")


def _checksum(block_hash: BlockHash, fields: Buffer, payload: Buffer) -> int:
    digest = xxhash.xxh3_64(block_hash + bytes(fields))
    digest.update(payload)
    return digest.intdigest()


_NAMES = (
    "magic", "version", "codec", "dtype", "num_layers", "num_kv_heads", "key_dim", "value_dim", "reserved",
    "num_tokens", "fingerprint", "payload_nbytes", "reserved",
)  # fmt: skip


def _first_difference(fields: Buffer, wanted: bytes) -> str:
    """The first field that differs, with both values; the fingerprint by name alone."""
    for name, value, allowed in zip(_NAMES, _FIELDS.unpack(fields), _FIELDS.unpack(wanted), strict=True):
        if value != allowed:
            return name if name == "fingerprint" else f"{name}: {value!r}, must be {allowed!r}"
    return "nothing"
