"""The four ways to turn a value into a block hash: serialise it, then digest the bytes.

`sha256` and `xxhash` serialise with pickle protocol 5, the `_cbor` names with canonical CBOR.
Pickle only ever writes here; nothing that came from outside is unpickled.
"""

import pickle
from collections.abc import Callable
from enum import StrEnum
from hashlib import sha256

import cbor2
from xxhash import xxh3_128_digest

from reprise_core.ids import BlockHash

PICKLE_PROTOCOL = 5


class HashAlgorithm(StrEnum):
    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"
    XXHASH = "xxhash"
    XXHASH_CBOR = "xxhash_cbor"

    @property
    def is_cryptographic(self) -> bool:
        return self in (HashAlgorithm.SHA256, HashAlgorithm.SHA256_CBOR)

    @property
    def is_cbor(self) -> bool:
        return self in (HashAlgorithm.SHA256_CBOR, HashAlgorithm.XXHASH_CBOR)

    @property
    def digest_nbytes(self) -> int:
        return 32 if self.is_cryptographic else 16


def serialize(algorithm: HashAlgorithm, value: object) -> bytes:
    """The exact bytes that are digested.

    Pickle output depends on object identity: a str or bytes object that occurs twice is written
    once and then referenced. `extra_keys` sees to it that identities never depend on the caller.
    """
    if algorithm.is_cbor:
        return cbor2.dumps(value, canonical=True)
    return pickle.dumps(value, protocol=PICKLE_PROTOCOL)


def bytes_digester(algorithm: HashAlgorithm) -> Callable[[bytes], bytes]:
    """Serialised value to digest: SHA-256, or XXH3-128 in its canonical (big-endian) form."""
    return _sha256 if algorithm.is_cryptographic else xxh3_128_digest


def digest_value(algorithm: HashAlgorithm, value: object) -> BlockHash:
    return value_digester(algorithm)(value)


def value_digester(algorithm: HashAlgorithm) -> Callable[[object], BlockHash]:
    """`digest_value` for one algorithm, with the choice made beforehand."""
    return _DIGESTERS[algorithm]


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


def _sha256_pickle(value: object) -> BlockHash:
    return BlockHash(sha256(pickle.dumps(value, protocol=PICKLE_PROTOCOL)).digest())


def _sha256_cbor(value: object) -> BlockHash:
    return BlockHash(sha256(cbor2.dumps(value, canonical=True)).digest())


def _xxhash_pickle(value: object) -> BlockHash:
    return BlockHash(xxh3_128_digest(pickle.dumps(value, protocol=PICKLE_PROTOCOL)))


def _xxhash_cbor(value: object) -> BlockHash:
    return BlockHash(xxh3_128_digest(cbor2.dumps(value, canonical=True)))


_DIGESTERS: dict[HashAlgorithm, Callable[[object], BlockHash]] = {
    HashAlgorithm.SHA256: _sha256_pickle,
    HashAlgorithm.SHA256_CBOR: _sha256_cbor,
    HashAlgorithm.XXHASH: _xxhash_pickle,
    HashAlgorithm.XXHASH_CBOR: _xxhash_cbor,
}


def external_hash(block_hash: BlockHash) -> int:
    """The form in events: the low 64 bits of the digest read as a big-endian number."""
    return int.from_bytes(block_hash[-8:], "big")
