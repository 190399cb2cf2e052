"""The bytes of many blocks at once.

A block's message is serialised (parent hash, token ids, extra keys). Parents are known only one
after the other, but the token ids of many blocks can be encoded ahead, in one call. Around them
stand an opening, the parent, a constant middle (pickle), and a suffix that most blocks share:

    canonical CBOR      83 58 20 | parent | 90 t .. t | f6
    pickle protocol 5   80 05 95 length(8) 43 20 | parent | 94 28 | t .. t | 74 94 4e 87 94 2e

The encoded whole is split where one block ends and the next begins. Pickled tuples have bytes of
their own there; for CBOR a marker number stands before each block. Should a wide token id's bytes
look like that place, or a pickle body need a second frame, the blocks go to the plain encoder:
slow, and always right.
"""

import pickle
from collections.abc import Iterable, Sequence
from hashlib import sha256
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

# Tokens that are encoded at once: more would leave the processor's caches, or one pickle frame.
_CHUNK_TOKENS = 8192

_CBOR_BYTES = 0x40
_CBOR_ARRAY = 0x80
_CBOR_UINT64 = b"\x1b"
_PICKLE_FRAME = b"\x80\x05\x95"
_PICKLE_SHORT_BYTES = b"C"
_PICKLE_MEMOIZE = b"\x94"
_PICKLE_MARK = b"("
_PICKLE_TUPLE = b"t"
# Tuples of up to three have other opcodes.
_PICKLE_MIN_TUPLE = 4


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

    def hash_blocks(
        self,
        parent: BlockHash,
        token_ids: list[int],
        num_blocks: int,
        extras: Sequence[HashedExtra] | None,
        *,
        checked: bool = True,
    ) -> list[BlockHash]:
        """The hashes of the first `num_blocks` >= 1 blocks of `token_ids`, which follow `parent`.

        `token_ids` may go on behind the last block. Unless they are `checked`, bad ones among those
        blocks are refused with InvalidInput. `extras` has one entry per block, or is None when no block
        has any.
        """
        ...


def fast_encoder(algorithm: HashAlgorithm, block_size: int) -> BlockEncoder:
    """The fastest in pure Python."""
    if block_size > _MAX_FAST_BLOCK_SIZE or (block_size < _PICKLE_MIN_TUPLE and not algorithm.is_cbor):
        return PlainEncoder(algorithm, block_size)
    return CborEncoder(algorithm, block_size) if algorithm.is_cbor else PickleEncoder(algorithm, block_size)


class PlainEncoder:
    """One block after the other, as the definition says."""

    def __init__(self, algorithm: HashAlgorithm, block_size: int) -> None:
        self._digest = value_digester(algorithm)
        self._block_size = block_size

    def hash_blocks(
        self,
        parent: BlockHash,
        token_ids: list[int],
        num_blocks: int,
        extras: Sequence[HashedExtra] | None,
        *,
        checked: bool = True,
    ) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        size, digest = self._block_size, self._digest
        if not checked:
            token_ids = checked_token_ids(token_ids[: num_blocks * size])
        for index in range(num_blocks):
            block = tuple(token_ids[index * size : (index + 1) * size])
            parent = digest((parent, block, extras[index] if extras is not None else None))
            hashes.append(parent)
        return hashes


class _TooLong(Exception):
    """A pickle body that would need more than one frame."""


class SuffixEncoder:
    """What follows the token ids in a message: the encoded keys, and how the tuple ends.

    `before` is put before each suffix.
    """

    def __init__(self, algorithm: HashAlgorithm, before: bytes = b"") -> None:
        self._encode = _cbor_suffix if algorithm.is_cbor else _pickle_suffix
        self._before = before
        self.plain = before + self._encode(None)

    def each(self, extras: Sequence[HashedExtra]) -> list[bytes]:
        """One suffix per block; neighbours often share one keys object."""
        suffixes: list[bytes] = []
        last: HashedExtra = None
        suffix = self.plain
        for extra in extras:
            if extra is not last:
                suffix, last = self._before + self._encode(extra), extra
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

    A message is opening, parent, middle, part, suffix; the part is the encoded token ids.
    """

    _few_blocks: int
    """So few blocks are faster one by one."""
    _middle = b""
    _tail = b""
    """Between part and suffix."""

    def __init__(self, algorithm: HashAlgorithm, block_size: int) -> None:
        self._block_size = block_size
        self._chunk_blocks = max(1, _CHUNK_TOKENS // block_size)
        self._plain = PlainEncoder(algorithm, block_size)
        self._suffixes = SuffixEncoder(algorithm, self._tail)
        self._is_sha256 = algorithm.is_cryptographic
        self._keyed_chain = _keyed_chain_sha256 if self._is_sha256 else _keyed_chain_xxh3

    def hash_blocks(
        self,
        parent: BlockHash,
        token_ids: list[int],
        num_blocks: int,
        extras: Sequence[HashedExtra] | None,
        *,
        checked: bool = True,
    ) -> list[BlockHash]:
        size, chunk_blocks = self._block_size, self._chunk_blocks
        hashes: list[BlockHash] = []
        for first in range(0, num_blocks, chunk_blocks):
            end = min(first + chunk_blocks, num_blocks)
            whole = first == 0 and len(token_ids) == end * size
            chunk = token_ids if whole else token_ids[first * size : end * size]
            if not checked:
                chunk = _checked_chunk(chunk, token_ids)
            chunk_extras = None if extras is None else extras[first:end]
            hashes += self._hash_chunk(parent, chunk, end - first, chunk_extras)
            parent = hashes[-1]
        return hashes

    def _hash_chunk(
        self, parent: BlockHash, token_ids: list[int], num_blocks: int, extras: Sequence[HashedExtra] | None
    ) -> list[BlockHash]:
        parts = self._parts(token_ids, num_blocks) if num_blocks > self._few_blocks else []
        if len(parts) != num_blocks:
            return self._plain.hash_blocks(parent, token_ids, num_blocks, extras)
        try:
            if extras is None:
                return self._chain(parent, parts)
            suffixes = self._suffixes.each(extras)
            lengths = [len(part) + len(suffix) for part, suffix in zip(parts, suffixes, strict=True)]
            openings = {length: self._opening(length) for length in set(lengths)}
        except (_TooLong, IndexError):
            return self._plain.hash_blocks(parent, token_ids, num_blocks, extras)
        heads = map(openings.__getitem__, lengths)
        return self._keyed_chain(parent, heads, self._middle, parts, suffixes)

    def _parts(self, token_ids: list[int], num_blocks: int) -> list[bytes]:
        """The encoded ids of each block; of another number when they cannot be told apart."""
        raise NotImplementedError

    def _opening(self, nbytes: int) -> bytes:
        """What stands before the parent; `nbytes` is the length of part and suffix."""
        raise NotImplementedError

    def _chain(self, parent: bytes, parts: list[bytes]) -> list[BlockHash]:
        """Of blocks without extra keys. IndexError for a part of wide ids."""
        raise NotImplementedError


def _checked_chunk(chunk: list[int], token_ids: list[int]) -> list[int]:
    """An error names the place in all the ids."""
    try:
        return checked_token_ids(chunk)
    except InvalidInput:
        checked_token_ids(token_ids)
        raise


class CborEncoder(_FastEncoder):
    """Before each block stands a marker, one of the largest unsigned 64-bit numbers, whose last bytes
    are the head of the block's array."""

    _few_blocks = 4

    def __init__(self, algorithm: HashAlgorithm, block_size: int) -> None:
        self._constant_opening = _cbor_head(_CBOR_ARRAY, 3) + _cbor_head(_CBOR_BYTES, algorithm.digest_nbytes)
        head = _cbor_head(_CBOR_ARRAY, block_size)
        marker = head.rjust(8, b"\xff")
        self._marker = int.from_bytes(marker, "big")
        self._split_at = _CBOR_UINT64 + marker[: -len(head)]
        super().__init__(algorithm, block_size)

    def _parts(self, token_ids: list[int], num_blocks: int) -> list[bytes]:
        size = self._block_size
        marked = [self._marker] * (num_blocks * (size + 1))
        for position in range(size):
            marked[position + 1 :: size + 1] = token_ids[position::size]
        # What stands before the first marker is the list's own head.
        return cbor2.dumps(marked).split(self._split_at)[1:]

    def _opening(self, nbytes: int) -> bytes:
        return self._constant_opening

    def _chain(self, parent: bytes, parts: list[bytes]) -> list[BlockHash]:
        chain = _cbor_chain_sha256 if self._is_sha256 else _cbor_chain_xxh3
        return chain(parent, self._constant_opening, parts, self._suffixes.plain)


class PickleEncoder(_FastEncoder):
    """Blocks are pickled as a tuple of tuples. The bytes between two of them hold three opcodes, which
    no id below 2,000,000 has within it; nor have they room in two neighbours."""

    _few_blocks = 12
    _middle = _PICKLE_MEMOIZE + _PICKLE_MARK
    _tail = _PICKLE_TUPLE
    _split_at = _PICKLE_TUPLE + _PICKLE_MEMOIZE + _PICKLE_MARK
    # Frame, the outer mark, the first block's; the ends of the last block and of the outer tuple.
    _before = len(_PICKLE_FRAME) + 8 + 2 * len(_PICKLE_MARK)
    _after = 2 * len(_PICKLE_TUPLE + _PICKLE_MEMOIZE) + 1

    def __init__(self, algorithm: HashAlgorithm, block_size: int) -> None:
        self._bytes_head = _PICKLE_SHORT_BYTES + bytes([algorithm.digest_nbytes])
        self._fixed_nbytes = len(self._bytes_head) + algorithm.digest_nbytes + len(self._middle)
        super().__init__(algorithm, block_size)
        # By the length of a part. Ids of 32 bits and wider may make longer ones.
        plain_nbytes = len(self._suffixes.plain)
        self._openings = [self._opening(nbytes + plain_nbytes) for nbytes in range(5 * block_size + 1)]

    def _parts(self, token_ids: list[int], num_blocks: int) -> list[bytes]:
        blocks = tuple(zip(*[iter(token_ids)] * self._block_size, strict=True))
        encoded = pickle.dumps(blocks, protocol=PICKLE_PROTOCOL)
        if len(encoded) >= _FRAME_LIMIT_NBYTES:  # There may be a second frame's head among the ids.
            return []
        return encoded[self._before : -self._after].split(self._split_at)

    def _opening(self, nbytes: int) -> bytes:
        body_nbytes = self._fixed_nbytes + nbytes
        if body_nbytes >= _FRAME_LIMIT_NBYTES:
            raise _TooLong
        return _PICKLE_FRAME + body_nbytes.to_bytes(8, "little") + self._bytes_head

    def _chain(self, parent: bytes, parts: list[bytes]) -> list[BlockHash]:
        chain = _pickle_chain_sha256 if self._is_sha256 else _pickle_chain_xxh3
        return chain(parent, self._openings, self._middle, parts, self._suffixes.plain)


# These loops are the whole cost of a hash beyond its serialised tokens, so each stands alone.


def _cbor_chain_sha256(parent: bytes, opening: bytes, parts: list[bytes], suffix: bytes) -> list[BlockHash]:
    join, digest = b"".join, sha256
    hashes = [parent := digest(join((opening, parent, part, suffix))).digest() for part in parts]
    return cast(list[BlockHash], hashes)


def _cbor_chain_xxh3(parent: bytes, opening: bytes, parts: list[bytes], suffix: bytes) -> list[BlockHash]:
    join, digest = b"".join, xxh3_128_digest
    hashes = [parent := digest(join((opening, parent, part, suffix))) for part in parts]
    return cast(list[BlockHash], hashes)


def _pickle_chain_sha256(
    parent: bytes, openings: list[bytes], middle: bytes, parts: list[bytes], suffix: bytes
) -> list[BlockHash]:
    join, digest = b"".join, sha256
    hashes = [
        parent := digest(join((openings[len(part)], parent, middle, part, suffix))).digest() for part in parts
    ]
    return cast(list[BlockHash], hashes)


def _pickle_chain_xxh3(
    parent: bytes, openings: list[bytes], middle: bytes, parts: list[bytes], suffix: bytes
) -> list[BlockHash]:
    join, digest = b"".join, xxh3_128_digest
    hashes = [parent := digest(join((openings[len(part)], parent, middle, part, suffix))) for part in parts]
    return cast(list[BlockHash], hashes)


def _keyed_chain_sha256(
    parent: bytes, openings: Iterable[bytes], middle: bytes, parts: list[bytes], suffixes: list[bytes]
) -> list[BlockHash]:
    hashes: list[bytes] = []
    for opening, part, suffix in zip(openings, parts, suffixes, strict=True):
        parent = sha256(b"".join((opening, parent, middle, part, suffix))).digest()
        hashes.append(parent)
    return cast(list[BlockHash], hashes)


def _keyed_chain_xxh3(
    parent: bytes, openings: Iterable[bytes], middle: bytes, parts: list[bytes], suffixes: list[bytes]
) -> list[BlockHash]:
    hashes: list[bytes] = []
    for opening, part, suffix in zip(openings, parts, suffixes, strict=True):
        parent = xxh3_128_digest(b"".join((opening, parent, middle, part, suffix)))
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
