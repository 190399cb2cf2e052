"""Where the blocks of a store's host tier are in its memory, for workers that share it.

The store writes the index, workers read it at any time, and nobody waits: so it is a hint. It may lack a
block that the tier has (its bucket was full), and what it names may be given to another value while a
worker copies it. So a worker asks the index again after the copy, and checks the copy (`block_codec`).

A table of buckets of `BUCKET_ENTRIES` entries, little-endian; the bucket of a block is the first 8 bytes of
its digest modulo their number:

    0  16s  XXH3-128 of the block's Redis key; zeros: no entry
    16 u64  offset of the value in the memory
    24 u64  its length in bytes
"""

import struct
from collections.abc import Sequence

import msgspec
import xxhash

from reprise_wire.block_transfer import Place

_PLACE = struct.Struct("<QQ")
_DIGEST_NBYTES = 16
_NO_ENTRY = bytes(_DIGEST_NBYTES)
ENTRY_NBYTES = _DIGEST_NBYTES + _PLACE.size
BUCKET_ENTRIES = 8
BUCKET_NBYTES = BUCKET_ENTRIES * ENTRY_NBYTES


class IndexEntry(msgspec.Struct, frozen=True, gc=False):
    start: int
    data: bytes

    @property
    def place(self) -> Place:
        return Place(*_PLACE.unpack_from(self.data, _DIGEST_NBYTES))


class HostIndex:
    """One writer, any number of readers in other processes."""

    def __init__(self, table: memoryview) -> None:
        """`table`: bytes, at least a bucket's; the writer's is writable."""
        self._table = table
        self._num_buckets = len(table) // BUCKET_NBYTES
        if not self._num_buckets:
            raise ValueError(f"an index of {len(table)} bytes, must have {BUCKET_NBYTES} or more")

    def find(self, names: Sequence[str]) -> list[IndexEntry | None]:
        """`names`: the blocks' Redis keys."""
        found: list[IndexEntry | None] = []
        for name in names:
            digest, start, bucket = self._bucket_of(name)
            at = bucket.find(digest)
            # Not found is -1, and no entry begins there.
            entry = None if at % ENTRY_NBYTES else IndexEntry(start + at, bucket[at : at + ENTRY_NBYTES])
            found.append(entry)
        return found

    def holds(self, entry: IndexEntry) -> bool:
        """Whether it is as it was found."""
        return bytes(self._table[entry.start : entry.start + ENTRY_NBYTES]) == entry.data

    def put(self, name: str, place: Place) -> None:
        """Instead of what was there under this name; in a full bucket, instead of another block."""
        digest, start, bucket = self._bucket_of(name)
        digests = [bucket[at : at + _DIGEST_NBYTES] for at in range(0, BUCKET_NBYTES, ENTRY_NBYTES)]
        chosen = next((one for one in (digest, _NO_ENTRY) if one in digests), None)
        slot = digests.index(chosen) if chosen is not None else digest[-1] % BUCKET_ENTRIES
        start += slot * ENTRY_NBYTES
        # A reader in between meets no entry.
        self._write(start, _NO_ENTRY)
        self._write(start + _DIGEST_NBYTES, _PLACE.pack(place.offset, place.nbytes))
        self._write(start, digest)

    def remove(self, name: str) -> None:
        digest, start, bucket = self._bucket_of(name)
        at = bucket.find(digest)
        if at % ENTRY_NBYTES == 0:
            self._write(start + at, _NO_ENTRY)

    def _bucket_of(self, name: str) -> tuple[bytes, int, bytes]:
        """The digest, and where its bucket begins and what is in it."""
        digest = xxhash.xxh3_128_digest(name.encode())
        start = int.from_bytes(digest[:8], "little") % self._num_buckets * BUCKET_NBYTES
        return digest, start, bytes(self._table[start : start + BUCKET_NBYTES])

    def _write(self, start: int, data: bytes) -> None:
        self._table[start : start + len(data)] = data
