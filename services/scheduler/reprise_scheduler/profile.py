"""The hash profile: how this engine hashes blocks, with a name that requests carry."""

import hashlib
import os
import secrets
from dataclasses import dataclass

from reprise_core.errors import FailedPrecondition
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.hash_chain import BlockHasher
from reprise_core.ids import BlockHash
from reprise_core.none_hash import none_hash, seed_text

_random_seed = secrets.token_hex(32)
"""Of this process, for the algorithms without a fixed seed: drawn by the scheduler, never elsewhere."""


@dataclass(frozen=True, slots=True)
class HashProfile:
    profile_id: str
    algorithm: HashAlgorithm
    hash_block_size: int
    none_hash: BlockHash

    @classmethod
    def make(cls, algorithm: HashAlgorithm, block_size: int) -> "HashProfile":
        seed = seed_text(algorithm, os.environ.get("PYTHONHASHSEED"))
        root = none_hash(algorithm, seed if seed is not None else _random_seed)
        facts = f"{algorithm}:{block_size}:".encode() + root
        return cls(hashlib.blake2b(facts, digest_size=8).hexdigest(), algorithm, block_size, root)

    def hasher(self) -> BlockHasher:
        return BlockHasher(
            algorithm=self.algorithm, block_size=self.hash_block_size, none_hash=self.none_hash
        )


def check_shared_seed(algorithm: HashAlgorithm, *, shared_store: bool) -> None:
    """A random seed per process and a store that others read never match: refused at start."""
    if shared_store and seed_text(algorithm, os.environ.get("PYTHONHASHSEED")) is None:
        raise FailedPrecondition(
            f"prefix_caching_hash_algo {algorithm} draws a random seed per process, so nothing in a shared"
            " store would ever be found: set PYTHONHASHSEED, or choose sha256 or sha256_cbor"
        )
