"""A simulated worker whose blocks go to a real store of this process and come back from it."""

import asyncio
import struct
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from reprise_core.ids import BlockHash
from reprise_store.tiered_store import GenerationChanged, TieredStore
from reprise_wire.block_transfer import BlockKey, Keyspace
from support.sim_worker import SimStore

KEYSPACE = Keyspace("reprise", "0" * 32)
"""Of `ZmqWorker`, with the scheduler's default namespace."""


class StoreOfSim(SimStore):
    """The simulated worker's view of a store, whose event loop is another thread's than the worker's."""

    def __init__(
        self, store: Callable[[], TieredStore], *, fails: Callable[[], bool] = lambda: False
    ) -> None:
        self._store = store
        self._fails = fails
        self._loop = asyncio.get_running_loop()
        super().__init__(blocks=_Blocks(self), generation=_AnyGeneration())  # type: ignore[arg-type]

    def call(self, make: Callable[[TieredStore, int], Coroutine[Any, Any, Any]]) -> Any:
        """`make` is given the store and the keyspace's generation."""

        async def run() -> Any:
            store = self._store()
            found = await store.lookup(KEYSPACE, (0,), ())
            try:
                return await make(store, found.generation)
            except GenerationChanged:
                return None

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(20)

    def load(self, block_hash: bytes) -> list[int] | None:
        if self._fails():
            return None
        key = BlockKey(0, 0, BlockHash(block_hash))
        loaded = self.call(lambda store, generation: store.load(KEYSPACE, generation, [key]))
        value = loaded.values[0] if loaded is not None else None
        return None if value is None else list(struct.unpack(f"<{len(value) // 8}Q", value))

    def save(self, block_hash: bytes, slots: list[int]) -> None:
        key, value = BlockKey(0, 0, BlockHash(block_hash)), struct.pack(f"<{len(slots)}Q", *slots)
        self.call(lambda store, generation: store.save(KEYSPACE, generation, [(key, value)]))


class _Blocks:
    """As much of a dictionary as the simulated worker uses."""

    def __init__(self, owner: StoreOfSim) -> None:
        self._owner = owner

    def __setitem__(self, block_hash: bytes, slots: list[int]) -> None:
        self._owner.save(block_hash, slots)

    def get(self, block_hash: bytes) -> list[int] | None:
        return self._owner.load(block_hash)

    def __iter__(self) -> Iterator[bytes]:
        raise NotImplementedError


class _AnyGeneration:
    """The store itself checks generations."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0
