"""The hash profile of this engine, with a name that requests carry."""

import hashlib
import os
import secrets

from reprise_core.errors import FailedPrecondition
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.none_hash import none_hash, seed_text
from reprise_wire.hash_profiles import HashProfile

_random_seed = secrets.token_hex(32)
"""Of this process, for the algorithms without a fixed seed: drawn by the scheduler, never elsewhere."""


def make_profile(algorithm: HashAlgorithm, block_size: int) -> HashProfile:
    seed = seed_text(algorithm, os.environ.get("PYTHONHASHSEED"))
    root = none_hash(algorithm, seed if seed is not None else _random_seed)
    facts = f"{algorithm}:{block_size}:".encode() + root
    return HashProfile(hashlib.blake2b(facts, digest_size=8).hexdigest(), algorithm, block_size, root)


def check_shared_seed(algorithm: HashAlgorithm, *, shared_store: bool) -> None:
    """A random seed per process and a store that others read never match: refused at start."""
    if shared_store and seed_text(algorithm, os.environ.get("PYTHONHASHSEED")) is None:
        raise FailedPrecondition(
            f"prefix_caching_hash_algo {algorithm} draws a random seed per process, so nothing in a shared"
            " store would ever be found: set PYTHONHASHSEED, or choose sha256 or sha256_cbor"
        )
