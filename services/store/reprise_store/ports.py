"""What the store needs from a place that keeps blocks.

Two implementations pass one suite (tests/integration/test_store_backends.py): host memory and Redis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from reprise_core.errors import ErrorKind, RepriseError
from reprise_store.keys import Scope

Value = bytes | memoryview
"""One block as the worker encoded it; the store never looks inside."""


class BackendDown(RepriseError):
    """The place cannot be reached or cannot be used: connection, time-out, password, rights."""

    kind = ErrorKind.UNAVAILABLE


class BackendPartlyDown(BackendDown):
    """One of several servers cannot be used; it says nothing about the keys of the others."""


class BackendBusy(RepriseError):
    """Our own limit on calls in flight held for too long; says nothing about the place's health."""

    kind = ErrorKind.EXHAUSTED


@dataclass(frozen=True, slots=True)
class Presence:
    found: list[bool]
    """One per key asked for."""
    generation: int | None
    """Read after the keys, so the answer is true for it; None while the scope has none."""


@dataclass(frozen=True, slots=True)
class Values:
    values: list[Value | None]
    generation: int | None
    """Read after the values."""


class Backend(Protocol):
    """Blocks by key. Keys of one call belong to one scope; each carries its generation as text.

    A value is written and read whole: no reader ever sees half of one. Every method may raise
    BackendDown or BackendBusy.
    """

    async def exists(self, scope: Scope, keys: Sequence[str]) -> Presence: ...

    async def get(self, scope: Scope, keys: Sequence[str]) -> Values: ...

    async def put(self, scope: Scope, items: Sequence[tuple[str, Value]]) -> Sequence[bool | None]:
        """Replaces what is there. False for each value that the place has no room for; None where one of
        several servers could not be asked, and others were."""

    async def ensure_generation(self, scope: Scope, proposal: int) -> int:
        """The scope's generation; becomes `proposal` when there is none."""

    async def advance_generation(self, scope: Scope, proposal: int) -> int:
        """One more than before (than `proposal` when there was none), atomically."""

    async def delete_stale(self, scope: Scope, generation: int) -> int:
        """Deletes the scope's blocks of other generations, a little at a time; how many went."""


class Places(Protocol):
    """Tells others where the host tier's values are; hears of each before its memory can be anything else."""

    def kept(self, name: str, value: Value) -> None: ...

    def left(self, name: str) -> None: ...


class Disk(Protocol):
    """The tier between host memory and Redis; its index is in memory, so asking it costs nothing."""

    capacity_bytes: int
    num_bytes: int

    @property
    def num_blocks(self) -> int: ...

    def has(self, name: str) -> bool: ...

    def names(self, scope: Scope) -> list[str]: ...

    def offer(self, scope: Scope, name: str, value: Value) -> bool:
        """Never waits. False: dropped and counted."""

    async def read(self, names: Sequence[str]) -> list[Value | None]:
        """None where there is none, or it cannot be read."""

    def drop(self, name: str) -> None: ...

    def at_generation(self, scope: Scope, generation: int) -> None:
        """Forgets the scope's blocks of other generations."""

    async def ensure_generation(self, scope: Scope, proposal: int) -> int: ...

    async def advance_generation(self, scope: Scope, proposal: int) -> int: ...
