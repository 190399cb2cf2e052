"""Block hashes through the compiled module, where it is built; and the choice between the encoders."""

from collections.abc import Sequence
from enum import StrEnum
from typing import cast

from reprise_core._accel import (
    DIGEST_SHA256,
    DIGEST_XXH3,
    FORM_CBOR,
    FORM_PICKLE,
    NativeModule,
    native_module,
)
from reprise_core.block_encoding import (
    BlockEncoder,
    HashedExtra,
    PlainEncoder,
    SuffixEncoder,
    checked_token_ids,
    fast_encoder,
)
from reprise_core.errors import InvalidInput
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.ids import BlockHash


class Encoding(StrEnum):
    """How blocks are serialised and digested. Hashes are the same whatever is chosen."""

    AUTO = "auto"
    """NATIVE where it is built, else PYTHON."""
    NATIVE = "native"
    PYTHON = "python"
    PLAIN = "plain"
    """One block after the other, as the definition says: slow."""


def make_encoder(algorithm: HashAlgorithm, block_size: int, encoding: Encoding) -> BlockEncoder:
    if encoding is Encoding.PLAIN:
        return PlainEncoder(algorithm, block_size)
    module = None if encoding is Encoding.PYTHON else native_module(algorithm)
    if module is not None:
        return NativeEncoder(module, algorithm, block_size)
    if encoding is Encoding.NATIVE:
        raise InvalidInput("encoding", f"the accelerator for {algorithm} is not built (make accel)")
    return fast_encoder(algorithm, block_size)


def available_encodings(algorithm: HashAlgorithm) -> list[Encoding]:
    """The different encoders that exist here, the slowest first."""
    native = [Encoding.NATIVE] if native_module(algorithm) is not None else []
    return [Encoding.PLAIN, Encoding.PYTHON, *native]


class NativeEncoder:
    """Checks token ids as it encodes them, so they need no pass of their own."""

    def __init__(self, module: NativeModule, algorithm: HashAlgorithm, block_size: int) -> None:
        self._hash_blocks = module.hash_blocks
        self._form = FORM_CBOR if algorithm.is_cbor else FORM_PICKLE
        self._digest = DIGEST_SHA256 if algorithm.is_cryptographic else DIGEST_XXH3
        self._block_size = block_size
        self._suffixes = SuffixEncoder(algorithm)
        self._plain = PlainEncoder(algorithm, block_size)

    def hash_blocks(
        self,
        parent: BlockHash,
        token_ids: list[int],
        num_blocks: int,
        extras: Sequence[HashedExtra] | None,
        *,
        checked: bool = True,
    ) -> list[BlockHash]:
        suffixes = self._suffixes.plain if extras is None else self._suffixes.each(extras)
        hashes = self._hash_blocks(
            self._form, self._digest, parent, token_ids, num_blocks, self._block_size, suffixes
        )
        if hashes is None:
            return self._plain.hash_blocks(parent, checked_token_ids(token_ids), num_blocks, extras)
        return cast(list[BlockHash], hashes)
