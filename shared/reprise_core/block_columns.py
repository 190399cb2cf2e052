"""The columns of a block record: one place per block in every array."""

from array import array
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from reprise_core.kv_events import MEDIUM_DEVICE, BlockStored, ExternalHash

ABSENT: Final = 0
"""The shape of a place whose block no medium holds."""
NO_BLOCK: Final = -1
"""As a parent: the chain begins here. As a child: none was stored."""
UNKNOWN_PARENT: Final = -2
NO_TOKENS: Final = 2**32 - 1

ExtraKeys = tuple[Any, ...]
"""Of one block, as its event had them."""

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode


class BlockShape(NamedTuple):
    """What blocks of one group and adapter have in common, as their events said it."""

    block_size: int
    lora_id: int | None
    lora_name: str | None
    group_idx: int | None
    kind: str | None
    window: int | None
    locality: str | None
    ownership: str | None

    @classmethod
    def of(cls, event: BlockStored) -> "BlockShape":
        return cls(
            event.block_size,
            event.lora_id,
            event.lora_name,
            event.group_idx,
            event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
            event.locality,
            event.ownership,
        )


class ValueTable(Generic[T]):
    """Values that many blocks share, each kept once for as long as somebody holds it; number 0 is None.

    Two values are one when their msgpack is (so 1 and True are two, and nothing needs to be hashable).
    """

    def __init__(self) -> None:
        self.values: list[T | None] = [None]
        self._num_holders = [1]
        self._numbers: dict[bytes, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def hold(self, value: T | None) -> int:
        """Its number, held once more."""
        if value is None:
            return 0
        code = _encode(value)
        number = self._numbers.get(code)
        if number is not None:
            self._num_holders[number] += 1
            return number
        if self._free:
            number = self._free.pop()
            self.values[number] = value
            self._num_holders[number] = 1
        else:
            number = len(self.values)
            self.values.append(value)
            self._num_holders.append(1)
        self._numbers[code] = number
        return number

    def hold_again(self, number: int) -> None:
        self._num_holders[number] += 1

    def release(self, number: int) -> None:
        if number == 0:
            return
        self._num_holders[number] -= 1
        if not self._num_holders[number]:
            del self._numbers[_encode(self.values[number])]
            self.values[number] = None
            self._free.append(number)


class BlockColumns:
    """A place has a block (shape not ABSENT), or stands for a parent that some block names and nobody
    holds, or is free.

    `child` is a hint: some block that was stored as a child of this one; check its parent.
    """

    def __init__(self) -> None:
        self.hashes: list[ExternalHash | None] = []
        self.parent = array("i")
        self.child = array("i")
        self.num_children = array("I")
        self.shape = array("I")
        self.extra_keys = array("I")
        self.token_start = array("I")
        self.tokens = array("I")
        self.copies: dict[str, array[int]] = {MEDIUM_DEVICE: array("I")}

    def __len__(self) -> int:
        return len(self.hashes)

    def append(self, block_hash: ExternalHash) -> int:
        place = len(self.hashes)
        self.hashes.append(block_hash)
        self.parent.append(NO_BLOCK)
        self.child.append(NO_BLOCK)
        self.num_children.append(0)
        self.shape.append(ABSENT)
        self.extra_keys.append(0)
        self.token_start.append(NO_TOKENS)
        for column in self.copies.values():
            column.append(0)
        return place

    def copies_in(self, medium: str) -> "array[int]":
        """The column of a medium, made when it is first met."""
        column = self.copies.get(medium)
        if column is None:
            column = self.copies[medium] = array("I", bytes(4 * len(self.hashes)))
        return column

    def copy(self) -> "BlockColumns":
        """Whole arrays, so some milliseconds for a million blocks."""
        twin = BlockColumns()
        twin.hashes = self.hashes[:]
        for name in ("parent", "child", "num_children", "shape", "extra_keys", "token_start", "tokens"):
            setattr(twin, name, getattr(self, name)[:])
        twin.copies = {medium: column[:] for medium, column in self.copies.items()}
        return twin
