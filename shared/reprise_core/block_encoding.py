"""The bytes of many blocks at once.

A block's message is serialised (parent hash, token ids, extra keys). Parents are known only one
after the other, but the token ids of a whole prompt can be encoded ahead, in one call. Around them
stand an opening, the parent, a constant middle, and a suffix that most blocks share:

    canonical CBOR      83 58 20 | parent | 90 t .. t | f6
    pickle protocol 5   80 05 95 length(8) 43 20 | parent | 94 28 t .. t 74 | 94 4e 87 94 2e

A marker number stands before each block, and the encoded whole is split at it. The marker's last
bytes are the middle (90, 94); only the bytes before them are split off. Should a wide token id's
bytes look like the marker, or a pickle body need a second frame, the blocks go to the plain encoder:
slow, and always right.
"""

import io
import pickle
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import islice
from typing import Annotated, Protocol, cast

import cbor2
import msgspec
from xxhash import xxh3_128_digest

from reprise_core.errors import InvalidInput
from reprise_core.extra_keys import ExtraKeys
from reprise_core.hash_algorithms import PICKLE_PROTOCOL, HashAlgorithm, value_digester
from reprise_core.ids import BlockHash

HashedExtra = ExtraKeys | tuple[ExtraKeys | int | None, ...] | None
"""The third member of a hashed tuple: extra keys, or with look-ahead (extra keys, t1, .., tL)."""


class _TokenIds(msgspec.Struct, array_like=True, gc=False):
    """A struct, since msgspec keeps what it knows of those between calls."""

    token_ids: list[Annotated[int, msgspec.Meta(ge=0)]]


# A pickle frame that reaches 64 KiB is split. Blocks of more tokens than this could get there.
_MAX_FAST_BLOCK_SIZE = 4096
_FRAME_LIMIT_NBYTES = 65536

# Tokens that are encoded at once: more would leave the processor's caches.
_CHUNK_TOKENS = 16_384

_CBOR_BYTES = 0x40
_CBOR_ARRAY = 0x80
_CBOR_UINT64 = b"\x1b"
_PICKLE_FRAME = b"\x80\x05\x95"
_PICKLE_SHORT_BYTES = b"C"
_PICKLE_MEMOIZE = b"\x94"
_PICKLE_INT32 = b"J"


def checked_token_ids(token_ids: Sequence[int]) -> list[int]:
    """The ids as a new list of plain, non-negative ints, or InvalidInput. Integers of any width pass."""
    plain = token_ids if type(token_ids) is list or type(token_ids) is tuple else _as_list(token_ids)
    try:
        return msgspec.convert((plain,), _TokenIds).token_ids
    except msgspec.ValidationError:
        raise _bad_token_id(plain) from None


def _as_list(token_ids: object) -> Sequence[int]:
    """Of another kind of sequence, or of an array with a `tolist`."""
    plain: object = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    if not isinstance(plain, Sequence):
        raise InvalidInput("token_ids", f"{type(token_ids).__name__}, must be a sequence of ints")
    return list(plain)


def _bad_token_id(token_ids: Sequence[object]) -> InvalidInput:
    for index, token in enumerate(token_ids):
        if type(token) is not int:
            return InvalidInput(f"token_ids[{index}]", f"{type(token).__name__}, must be an int")
        if token < 0:
            return InvalidInput(f"token_ids[{index}]", f"{token}, must be at least 0")
    raise AssertionError("every token id is valid")


class BlockEncoder(Protocol):
    """Digests the blocks of a chain, given all their token ids."""

    checks_token_ids: bool
    """Whether `hash_blocks` refuses bad token ids itself."""

    def hash_blocks(
        self, parent: BlockHash, token_ids: list[int], num_blocks: int, extras: Sequence[HashedExtra] | None
    ) -> list[BlockHash]:
        """The hashes of the first `num_blocks` >= 1 blocks of `token_ids`, which follow `parent`.

        `token_ids` are checked, unless `checks_token_ids`, and may go on behind the last block.
        `extras` has one entry per block, or is None when no block has any.
        """
        ...


def fast_encoder(algorithm: HashAlgorithm, block_size: int) -> BlockEncoder:
    """The fastest in pure Python."""
    if block_size > _MAX_FAST_BLOCK_SIZE:
        return PlainEncoder(algorithm, block_size)
    return CborEncoder(algorithm, block_size) if algorithm.is_cbor else PickleEncoder(algorithm, block_size)


class PlainEncoder:
    """One block after the other, as the definition says."""

    checks_token_ids = False

    def __init__(self, algorithm: HashAlgorithm, block_size: int) -> None:
        self._digest = value_digester(algorithm)
        self._block_size = block_size

    def hash_blocks(
        self, parent: BlockHash, token_ids: list[int], num_blocks: int, extras: Sequence[HashedExtra] | None
    ) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        size, digest = self._block_size, self._digest
        for index in range(num_blocks):
            block = tuple(token_ids[index * size : (index + 1) * size])
            parent = digest((parent, block, extras[index] if extras is not None else None))
            hashes.append(parent)
        return hashes


class _TooLong(Exception):
    """A pickle body that would need more than one frame."""


class SuffixEncoder:
    """What follows the token ids in a message: the encoded keys, and how the tuple ends."""

    def __init__(self, algorithm: HashAlgorithm) -> None:
        self._encode = _cbor_suffix if algorithm.is_cbor else _pickle_suffix
        self.plain = self._encode(None)

    def each(self, extras: Sequence[HashedExtra]) -> list[bytes]:
        """One suffix per block; neighbours often share one keys object."""
        suffixes: list[bytes] = []
        last: HashedExtra = None
        suffix = self.plain
        for extra in extras:
            if extra is not last:
                suffix, last = self._encode(extra), extra
            suffixes.append(suffix)
        return suffixes


def _cbor_suffix(extra: HashedExtra) -> bytes:
    return cbor2.dumps(extra, canonical=True)


def _pickle_suffix(extra: HashedExtra) -> bytes:
    """Cut from a message with other members: the keys begin at memo 2, as they do in a block."""
    message = pickle.dumps((b"", (0,), extra), protocol=PICKLE_PROTOCOL)
    before = _PICKLE_SHORT_BYTES + b"\x00" + _PICKLE_MEMOIZE + b"K\x00\x85"
    return message[message.index(before) + len(before) :]


class _FastEncoder:
    """What the two fast encoders share.

    A message is opening, parent, the part with the token ids, suffix.
    """

    checks_token_ids = False
    _few_blocks: int
    """So few blocks are faster one by one."""
    _marker: int
    """Its encoding ends with the bytes that stand between parent and token ids."""
    _split_at: bytes
    """The marker's encoding without those."""

    def __init__(self, algorithm: HashAlgorithm, block_size: int) -> None:
        self._block_size = block_size
        self._chunk_tokens = max(1, _CHUNK_TOKENS // block_size) * block_size
        self._is_sha256 = algorithm.is_cryptographic
        self._plain = PlainEncoder(algorithm, block_size)
        self._suffixes = SuffixEncoder(algorithm)
        # By the length of a part. Ids of 32 bits and wider may make longer ones.
        self._plain_openings = [
            self._opening(part_nbytes + len(self._suffixes.plain))
            for part_nbytes in range(5 * block_size + 8)
        ]

    def hash_blocks(
        self, parent: BlockHash, token_ids: list[int], num_blocks: int, extras: Sequence[HashedExtra] | None
    ) -> list[BlockHash]:
        if num_blocks <= self._few_blocks:
            return self._plain.hash_blocks(parent, token_ids, num_blocks, extras)
        chunk_tokens = self._chunk_tokens
        if num_blocks * self._block_size <= chunk_tokens:
            return self._hash_chunk(parent, token_ids, num_blocks, extras)
        hashes: list[BlockHash] = []
        while len(hashes) < num_blocks:
            first = len(hashes)
            start = first * self._block_size
            count = min(num_blocks - first, chunk_tokens // self._block_size)
            chunk_extras = None if extras is None else extras[first : first + count]
            hashes += self._hash_chunk(parent, token_ids[start : start + chunk_tokens], count, chunk_extras)
            parent = hashes[-1]
        return hashes

    def _hash_chunk(
        self, parent: BlockHash, token_ids: list[int], num_blocks: int, extras: Sequence[HashedExtra] | None
    ) -> list[BlockHash]:
        parts = self._encode(token_ids, num_blocks).split(self._split_at)
        if len(parts) != num_blocks + 2:
            return self._plain.hash_blocks(parent, token_ids, num_blocks, extras)
        # Before the first marker and after the last one stand the container's own bytes.
        parts = parts[1:-1]
        try:
            if extras is None:
                chain = _chain_sha256 if self._is_sha256 else _chain_xxh3
                return chain(parent, self._plain_openings, parts, self._suffixes.plain)
            suffixes = self._suffixes.each(extras)
            lengths = [len(part) + len(suffix) for part, suffix in zip(parts, suffixes, strict=True)]
            openings = {length: self._opening(length) for length in set(lengths)}
        except (_TooLong, IndexError):
            return self._plain.hash_blocks(parent, token_ids, num_blocks, extras)
        keyed_chain = _keyed_chain_sha256 if self._is_sha256 else _keyed_chain_xxh3
        return keyed_chain(parent, map(openings.__getitem__, lengths), parts, suffixes)

    def _encode(self, token_ids: list[int], num_blocks: int) -> bytes:
        """Marker, block, marker, .., block, marker, within one container."""
        raise NotImplementedError

    def _opening(self, nbytes: int) -> bytes:
        """What stands before the parent; `nbytes` is the length of part and suffix."""
        raise NotImplementedError


class CborEncoder(_FastEncoder):
    """The marker is one of the largest unsigned 64-bit numbers."""

    _few_blocks = 4

    def __init__(self, algorithm: HashAlgorithm, block_size: int) -> None:
        self._constant_opening = _cbor_head(_CBOR_ARRAY, 3) + _cbor_head(_CBOR_BYTES, algorithm.digest_nbytes)
        array_head = _cbor_head(_CBOR_ARRAY, block_size)
        marker = array_head.rjust(8, b"\xff")
        self._marker = int.from_bytes(marker, "big")
        self._split_at = _CBOR_UINT64 + marker[: -len(array_head)]
        super().__init__(algorithm, block_size)

    def _encode(self, token_ids: list[int], num_blocks: int) -> bytes:
        size = self._block_size
        marked = [self._marker] * (num_blocks * (size + 1) + 1)
        for position in range(size):
            marked[position + 1 :: size + 1] = token_ids[position : num_blocks * size : size]
        return cbor2.dumps(marked)

    def _opening(self, nbytes: int) -> bytes:
        return self._constant_opening


class PickleEncoder(_FastEncoder):
    """The marker is a negative number, which no token id may be.

    The token ids are written in protocol 3 without memo, which differs from protocol 5 by the frame
    and the memo opcodes alone; those stand in the opening, the middle and the suffix.
    """

    _few_blocks = 12
    _marker = int.from_bytes(b"\xff\xff\xff" + _PICKLE_MEMOIZE, "little", signed=True)
    _split_at = _PICKLE_INT32 + b"\xff\xff\xff"

    def __init__(self, algorithm: HashAlgorithm, block_size: int) -> None:
        self._bytes_head = _PICKLE_SHORT_BYTES + bytes([algorithm.digest_nbytes])
        self._fixed_nbytes = len(self._bytes_head) + algorithm.digest_nbytes
        super().__init__(algorithm, block_size)

    def _encode(self, token_ids: list[int], num_blocks: int) -> bytes:
        blocks = zip(*[iter(token_ids)] * self._block_size, strict=False)
        marked: list[object] = [self._marker] * (2 * num_blocks + 1)
        marked[1::2] = islice(blocks, num_blocks)
        target = io.BytesIO()
        pickler = pickle.Pickler(target, protocol=3)
        pickler.fast = True
        pickler.dump(tuple(marked))
        return target.getvalue()

    def _opening(self, nbytes: int) -> bytes:
        body_nbytes = self._fixed_nbytes + nbytes
        if body_nbytes >= _FRAME_LIMIT_NBYTES:
            raise _TooLong
        return _PICKLE_FRAME + body_nbytes.to_bytes(8, "little") + self._bytes_head


# These four loops are the whole cost of a hash beyond its serialised tokens, so each stands alone.


def _chain_sha256(parent: bytes, openings: list[bytes], parts: list[bytes], suffix: bytes) -> list[BlockHash]:
    join = b"".join
    hashes = [parent := sha256(join((openings[len(part)], parent, part, suffix))).digest() for part in parts]
    return cast(list[BlockHash], hashes)


def _chain_xxh3(parent: bytes, openings: list[bytes], parts: list[bytes], suffix: bytes) -> list[BlockHash]:
    join = b"".join
    hashes = [parent := xxh3_128_digest(join((openings[len(part)], parent, part, suffix))) for part in parts]
    return cast(list[BlockHash], hashes)


def _keyed_chain_sha256(
    parent: bytes, openings: Iterable[bytes], parts: list[bytes], suffixes: list[bytes]
) -> list[BlockHash]:
    hashes: list[bytes] = []
    for opening, part, suffix in zip(openings, parts, suffixes, strict=True):
        parent = sha256(b"".join((opening, parent, part, suffix))).digest()
        hashes.append(parent)
    return cast(list[BlockHash], hashes)


def _keyed_chain_xxh3(
    parent: bytes, openings: Iterable[bytes], parts: list[bytes], suffixes: list[bytes]
) -> list[BlockHash]:
    hashes: list[bytes] = []
    for opening, part, suffix in zip(openings, parts, suffixes, strict=True):
        parent = xxh3_128_digest(b"".join((opening, parent, part, suffix)))
        hashes.append(parent)
    return cast(list[BlockHash], hashes)


def _cbor_head(major: int, value: int) -> bytes:
    """The head of a CBOR item in its shortest form; `value` is a length or count."""
    if value < 24:
        return bytes([major | value])
    for lead, nbytes in ((24, 1), (25, 2), (26, 4)):
        if value < 1 << 8 * nbytes:
            return bytes([major | lead]) + value.to_bytes(nbytes, "big")
    return bytes([major | 27]) + value.to_bytes(8, "big")
