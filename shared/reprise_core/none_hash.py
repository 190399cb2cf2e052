"""NONE_HASH: the parent of every chain's first block."""

from reprise_core.hash_algorithms import HashAlgorithm, digest_value
from reprise_core.ids import BlockHash

FIXED_SEED_TEXT = "vllm-none-hash"


def seed_text(algorithm: HashAlgorithm, pythonhashseed: str | None) -> str | None:
    """The text to hash; None means that the caller must draw a random one.

    `pythonhashseed` is the environment's PYTHONHASHSEED, None when it is not set; an empty value
    and the word `random` are texts like any other. Without it the cryptographic algorithms have a
    fixed seed, and XXH3 a secret one, since its collisions can be constructed.
    """
    if pythonhashseed is not None:
        return pythonhashseed
    return FIXED_SEED_TEXT if algorithm.is_cryptographic else None


def none_hash(algorithm: HashAlgorithm, seed_text: str) -> BlockHash:
    return digest_value(algorithm, seed_text)
