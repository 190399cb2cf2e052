"""One KV block as one value: a header and the payload, checked end to end.

The worker that saves a block encodes it and the worker that loads it decodes it; stores and Redis
keep it as it is. Layout, little-endian:

    0  4s  magic "RKVB"
    4  u16 version (1)
    6  u16 codec (0 = as it is)
    8  u32 number of tokens
    12 16s model fingerprint
    28 u64 payload length in bytes
    36 u64 XXH3-64 of the block hash, the first 36 header bytes and the payload
    44     payload

The block hash goes into the checksum, so a value stored under another block's key is refused too.
"""

import struct

import xxhash

from reprise_core.errors import DataLoss
from reprise_core.ids import BlockHash

MAGIC = b"RKVB"
VERSION = 1
CODEC_NONE = 0
_FIELDS = struct.Struct("<4sHHI16sQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_NBYTES = _FIELDS.size + _CHECKSUM.size

Buffer = bytes | bytearray | memoryview


class BadBlock(DataLoss):
    """A value that must not be served; `reason` is missing, damaged or foreign."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def encode_header(payload: Buffer, *, block_hash: BlockHash, num_tokens: int, fingerprint: bytes) -> bytes:
    """The header that stands before `payload`; the two may travel as separate frames."""
    fields = _FIELDS.pack(MAGIC, VERSION, CODEC_NONE, num_tokens, fingerprint, len(payload))
    return fields + _CHECKSUM.pack(_checksum(block_hash, fields, payload))


def decode_block(value: Buffer, *, block_hash: BlockHash, num_tokens: int, fingerprint: bytes) -> memoryview:
    """The payload of a stored value, or BadBlock."""
    view = memoryview(value)
    if len(view) < HEADER_NBYTES:
        raise BadBlock("damaged", f"block value of {len(view)} bytes is shorter than its header")
    fields = bytes(view[: _FIELDS.size])
    magic, version, codec, stored_tokens, stored_fingerprint, length = _FIELDS.unpack(fields)
    if magic != MAGIC or version != VERSION or codec != CODEC_NONE:
        raise BadBlock("foreign", f"block value has magic {magic!r}, version {version}, codec {codec}")
    if stored_fingerprint != fingerprint or stored_tokens != num_tokens:
        raise BadBlock("foreign", "block value of another model or block size")
    payload = view[HEADER_NBYTES:]
    if len(payload) != length:
        raise BadBlock("damaged", f"block payload has {len(payload)} bytes, header says {length}")
    (checksum,) = _CHECKSUM.unpack(view[_FIELDS.size : HEADER_NBYTES])
    if checksum != _checksum(block_hash, fields, payload):
        raise BadBlock("damaged", "block checksum does not match")
    return payload


def _checksum(block_hash: BlockHash, fields: bytes, payload: Buffer) -> int:
    digest = xxhash.xxh3_64(block_hash)
    digest.update(fields)
    digest.update(payload)
    return digest.intdigest()
