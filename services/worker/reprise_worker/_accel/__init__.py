"""The optional compiled copy of blocks: `make accel` builds it, nothing requires it.

`block_copy.c` is the twin of what `block_fills` does block by block; both pass the same tests.
"""

from importlib import import_module
from typing import Protocol, cast

from reprise_core._accel import path_of


class NativeCopy(Protocol):
    def load(self, xxhash_path: str) -> bool:
        """Finds the digest in the extension module that Python itself uses."""

    def copy_blocks(
        self,
        memory: int,
        memory_nbytes: int,
        cache: int,
        block_nbytes: int,
        num_blocks: int,
        fields: bytes,
        blocks: tuple[tuple[int, int, int, bytes], ...],
    ) -> bytes:
        """`memory` and `cache`: addresses. `fields`: of the blocks' headers, up to the checksum. `blocks`:
        offset and length of the value in the memory, block id and block hash of each. Per block 1 when the
        cache now holds what its hash stands for; else the block may hold anything. Without the GIL."""


def native_copy() -> NativeCopy | None:
    """The compiled module, when it is built and finds the digest."""
    try:
        module = cast(NativeCopy, import_module("reprise_worker._accel._block_copy"))
        return module if module.load(path_of("xxhash._xxhash")) else None
    except ImportError:
        return None
