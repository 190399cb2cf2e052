"""Worker <-> store: block bytes over ZMQ.

The store binds a ROUTER, workers connect DEALERs. Frame 0 is a msgpack `TransferHeader`; the
frames that follow are raw block values (`block_codec`), one per block, sent without copies.

    worker -> store   SAVE   keys=[...], then one frame per key      -> SAVED  (accepted per key)
    worker -> store   LOAD   keys=[...]                              -> LOADED one frame per key,
                                                                       empty where there is none

A key is what follows the keyspace: rank, group and block hash. A SAVE or LOAD names the generation
it began with; the store answers REFUSED when that has changed.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from reprise_core.errors import DataLoss
from reprise_core.ids import BlockHash

TRANSFER_VERSION = 1


class TransferKind(StrEnum):
    SAVE = "save"
    SAVED = "saved"
    LOAD = "load"
    LOADED = "loaded"
    REFUSED = "refused"


class Keyspace(msgspec.Struct, frozen=True, array_like=True):
    """Everything of an external key but generation, rank, group and hash."""

    namespace: str
    fingerprint: str
    adapter: str = ""
    tp_size: int = 1


class BlockKey(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    group_id: int
    block_hash: BlockHash


class TransferHeader(msgspec.Struct, frozen=True, array_like=True):
    version: int
    kind: str
    transfer_id: int
    """The sender's counter; the answer repeats it."""
    keyspace: Keyspace | None = None
    generation: int = 0
    keys: tuple[BlockKey, ...] = ()
    accepted: tuple[bool, ...] = ()
    """SAVED: per key, whether it was taken (False = dropped at a limit)."""
    reason: str = ""
    """REFUSED: generation, version, malformed or unavailable."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TransferHeader)


def encode_transfer(header: TransferHeader) -> bytes:
    return _encoder.encode(header)


def decode_transfer(frames: Sequence[bytes | memoryview]) -> TransferHeader:
    """Raises DataLoss for frames that are no message of this protocol."""
    if not frames:
        raise DataLoss("transfer: no frames")
    try:
        header = _decoder.decode(frames[0])
    except msgspec.DecodeError as error:
        raise DataLoss(f"transfer header: {error}") from error
    num_values = len(frames) - 1
    wants_values = header.kind in (TransferKind.SAVE, TransferKind.LOADED)
    if wants_values and num_values != len(header.keys):
        raise DataLoss(f"transfer {header.kind}: {len(header.keys)} keys but {num_values} values")
    return header


def redis_key(keyspace: Keyspace, generation: int, key: BlockKey) -> str:
    """`namespace:generation:fingerprint:[adapter:]tp-size:rank:group:hash`."""
    adapter = f"{keyspace.adapter}:" if keyspace.adapter else ""
    return (
        f"{keyspace.namespace}:{generation}:{keyspace.fingerprint}:{adapter}"
        f"{keyspace.tp_size}:{key.rank}:{key.group_id}:{key.block_hash.hex()}"
    )
