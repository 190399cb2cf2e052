"""Worker <-> store: block bytes, and the messages about them.

The store binds a ROUTER, workers connect DEALERs. Frame 0 is a msgpack `TransferHeader`; the
frames that follow are raw block values (`block_codec`), sent without copies.

    worker -> store   HELLO                                          -> WELCOME (where to ask for shared
                                                                       memory), or REFUSED (version)
    worker -> store   SAVE   keys=[...], values                      -> SAVED  (accepted per key)
    worker -> store   LOAD   keys=[...]                              -> LOADED values in the keys' order,
                                                                       nothing where there is none
    worker -> store   RELEASE released=[transfer ids of LOADED]
    worker -> store   READ   keys=[...] of blocks that it found by itself in the store's memory

Between machines the values are frames, one per key, empty where there is none. On one machine they stay
in shared memory and the header says where (`places`): a SAVE names places in the worker's memory, which
the worker leaves alone until the answer; a LOADED names places in the store's, which the store leaves
alone until the RELEASE, for as long as its lease lasts at most. So a reader checks what it has copied
(`block_codec`), never what it is about to copy. What is in host memory a worker finds without asking
(`host_index`); then it tells what it has read, for the order of use. `shared_memory` is how the two come
to share it; from then on messages without values go over that connection, as frame 0 alone, and those with
values over ZMQ.

A key is what follows the keyspace: rank, group and block hash. A SAVE or LOAD names the generation
it began with; the store answers REFUSED when that has changed. The index has none of an older one.
"""

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache

import msgspec

from reprise_core.errors import DataLoss
from reprise_core.ids import BlockHash

TRANSFER_VERSION = 5


class TransferKind(StrEnum):
    HELLO = "hello"
    WELCOME = "welcome"
    SAVE = "save"
    SAVED = "saved"
    LOAD = "load"
    LOADED = "loaded"
    RELEASE = "release"
    READ = "read"
    REFUSED = "refused"


class Keyspace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Everything of an external key but generation, rank, group and hash."""

    namespace: str
    fingerprint: str
    adapter: str = ""
    tp_size: int = 1


class BlockKey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    rank: int
    group_id: int
    block_hash: BlockHash


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a value is in shared memory. Length 0: there is none. Offset -1: it is the next frame."""

    offset: int
    nbytes: int


class MemoryOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker on the same machine asks for shared memory, and what it says there to be known."""

    address: str
    token: bytes
    index: Place | None
    """Where in the memory the host tier's index is; None where there is no such tier."""


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
    """REFUSED: generation, version, malformed, unavailable, or memory (a place in none that is shared)."""
    places: tuple[Place, ...] = ()
    """SAVE, LOADED: one per key asked where memory is shared, else none."""
    released: tuple[int, ...] = ()
    memory: MemoryOffer | None = None
    """WELCOME: None where memory is not shared."""


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
    if header.kind in (TransferKind.SAVE, TransferKind.LOADED):
        _check_values(header, len(frames) - 1)
    return header


def _check_values(header: TransferHeader, num_frames: int) -> None:
    num_keys, num_places = len(header.keys), len(header.places)
    if header.kind == TransferKind.SAVE and num_places not in (0, num_keys):
        raise DataLoss(f"transfer {header.kind}: {num_keys} keys but {num_places} places")
    if header.kind == TransferKind.LOADED and not num_places:
        return  # who asked knows how many there should be
    num_wanted = sum(place.offset < 0 for place in header.places) if num_places else num_keys
    if num_frames != num_wanted:
        raise DataLoss(f"transfer {header.kind}: {num_wanted} values to come but {num_frames} frames")


def redis_key(keyspace: Keyspace, generation: int, key: BlockKey) -> str:
    """`namespace:generation:fingerprint:[adapter:]tp-size:rank:group:hash`."""
    return redis_keys(keyspace, generation, (key,))[0]


def redis_keys(keyspace: Keyspace, generation: int, keys: Sequence[BlockKey]) -> list[str]:
    adapter = f"{keyspace.adapter}:" if keyspace.adapter else ""
    prefix = f"{keyspace.namespace}:{generation}:{keyspace.fingerprint}:{adapter}{keyspace.tp_size}:"
    return [f"{prefix}{key.rank}:{key.group_id}:{key.block_hash.hex()}" for key in keys]


def parse_redis_key(name: str) -> tuple[Keyspace, int, BlockKey]:
    """The inverse of `redis_key` (whose parts hold no colon). Raises ValueError for another form."""
    prefix, rank, group_id, digest = name.rsplit(":", 3)
    keyspace, generation = _parse_prefix(prefix)
    return keyspace, generation, BlockKey(int(rank), int(group_id), BlockHash(bytes.fromhex(digest)))


@lru_cache(maxsize=256)
def _parse_prefix(prefix: str) -> tuple[Keyspace, int]:
    """Of all the keys of a transfer it is the same."""
    namespace, generation, fingerprint, *adapter, tp_size = prefix.split(":")
    return Keyspace(namespace, fingerprint, ":".join(adapter), int(tp_size)), int(generation)
