"""The compiled copy: a block is right exactly when block_codec says so, and no other block is written."""

import mmap
import os
import random

import numpy as np
import pytest

from reprise_core.ids import BlockHash
from reprise_runtime.shared_memory import Memory, make_memory
from reprise_wire.block_codec import HEADER_NBYTES, BadBlock, BlockFormat, decode_block, encode_header
from reprise_worker._accel import native_copy

pytestmark = pytest.mark.skipif(native_copy() is None, reason="no C compiler built it")

NUM_BLOCKS = 6
SIZES = [1, 576, 32 * 1024, 100_003]
"""Of payloads."""


class Case:
    """A value in shared memory, and a cache of so large blocks."""

    def __init__(self, payload_nbytes: int) -> None:
        self.format = BlockFormat(b"f" * 16, "float32", 1, 1, 1, 1, 16, payload_nbytes)
        self.block_hash = BlockHash(os.urandom(32))
        payload = os.urandom(payload_nbytes)
        header = encode_header(payload, block_hash=self.block_hash, format=self.format)
        self.value = bytearray(header + payload)
        self.offset = 4096 + 24
        self.cache = np.zeros((NUM_BLOCKS, payload_nbytes), dtype=np.uint8)

    def memory(self) -> Memory:
        memory = make_memory("test", mmap.PAGESIZE * (2 + (self.offset + len(self.value)) // mmap.PAGESIZE))
        os.pwrite(memory.fd, self.value, self.offset)
        return memory

    def copy(self, *blocks: tuple[int, int, int, bytes]) -> bytes:
        native, memory = native_copy(), self.memory()
        assert native is not None
        size, fields = self.format.payload_nbytes, self.format.fields
        return native.copy_blocks(
            memory.map(), memory.nbytes, self.cache.ctypes.data, size, NUM_BLOCKS, fields, blocks
        )

    def block(self, block_id: int, block_hash: bytes | None = None) -> tuple[int, int, int, bytes]:
        return (self.offset, len(self.value), block_id, block_hash or self.block_hash)

    def untouched(self, *but: int) -> bool:
        return not any(self.cache[block].any() for block in range(NUM_BLOCKS) if block not in but)


@pytest.mark.parametrize("size", SIZES)
def test_right_blocks_are_copied_and_said_to_be_right(size: int) -> None:
    case = Case(size)
    assert case.copy(*(case.block(block) for block in (4, 0, 5))) == b"\1\1\1"
    for block in (4, 0, 5):
        assert case.cache[block].tobytes() == case.value[HEADER_NBYTES:]
    assert case.untouched(4, 0, 5)


@pytest.mark.parametrize("size", SIZES)
def test_it_agrees_with_the_codec_wherever_a_bit_is_wrong(size: int) -> None:
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    places = [*range(HEADER_NBYTES), *(HEADER_NBYTES + rng.randrange(size) for _ in range(20))]
    for place in places:
        case = Case(size)
        case.value[place] ^= 1 << rng.randrange(8)
        with pytest.raises(BadBlock):
            decode_block(case.value, block_hash=case.block_hash, format=case.format)
        assert case.copy(case.block(3)) == b"\0"
        assert case.untouched(3)


def test_another_hash_is_not_right() -> None:
    case = Case(576)
    other = os.urandom(16)
    assert case.copy(case.block(1), case.block(2, other), case.block(3)) == b"\1\0\1"


@pytest.mark.parametrize(
    ("offset", "nbytes", "block_id"),
    [
        (2**64 - 1, None, 0),
        (-1, None, 0),
        (1 << 40, None, 0),
        (3 * 4096 - 100, None, 0),
        (None, 2**64 - 1, 0),
        (None, 0, 0),
        (None, 64, 0),
        (None, 639, 0),
        (None, None, NUM_BLOCKS),
        (None, None, 2**63),
    ],
)
def test_what_is_out_of_range_is_not_touched(offset: int | None, nbytes: int | None, block_id: int) -> None:
    case = Case(576)
    usual = case.block(0)
    block = (usual[0] if offset is None else offset, usual[1] if nbytes is None else nbytes, block_id)
    assert case.copy((*block, case.block_hash)) == b"\0"
    assert case.untouched()


@pytest.mark.parametrize(
    "blocks", [((1, 2, 3),), (("0", 640, 0, b"h"),), ([0, 640, 0, b"h"],), ((0, 640, 0, "h"),)]
)
def test_what_is_no_block_is_a_type_error(blocks: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        Case(576).copy(*blocks)  # type: ignore[arg-type]


def test_nothing_to_copy() -> None:
    assert Case(576).copy() == b""
