"""The optional compiled hasher: `make accel` builds it, nothing requires it.

`block_hash.c` is the twin of `block_encoding`; both pass the same tests.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from reprise_core.hash_algorithms import HashAlgorithm

FORM_PICKLE, FORM_CBOR = 0, 1
DIGEST_SHA256, DIGEST_XXH3 = 0, 1


class NativeModule(Protocol):
    def load(self, hashlib_path: str, xxhash_path: str) -> tuple[bool, bool]:
        """Finds the digests in the extension modules that Python itself uses: (SHA-256, XXH3-128)."""

    def hash_blocks(
        self,
        form: int,
        digest: int,
        parent: bytes,
        token_ids: list[int],
        num_blocks: int,
        block_size: int,
        suffixes: bytes | Sequence[bytes],
    ) -> list[bytes] | None:
        """None when a token id is no exact int in [0, 2**64), or a pickle body needs two frames."""


def native_module(algorithm: HashAlgorithm) -> NativeModule | None:
    """The compiled module, when it is built and finds the digest of this algorithm."""
    try:
        module = cast(NativeModule, import_module("reprise_core._accel._block_hash"))
        has_sha256, has_xxh3 = module.load(path_of("_hashlib"), path_of("xxhash._xxhash"))
    except ImportError:
        return None
    return module if (has_sha256 if algorithm.is_cryptographic else has_xxh3) else None


def path_of(extension_module: str) -> str:
    """ImportError for a module that is linked into the interpreter."""
    path = getattr(import_module(extension_module), "__file__", None)
    if not isinstance(path, str):
        raise ImportError(f"{extension_module} has no file")
    return path
