"""Blocks in this process's memory: least recently used out first, bounded by bytes."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from reprise_store.keys import Scope
from reprise_store.ports import Places, Presence, Value, Values
from reprise_store.tier_changes import TierChanges
from reprise_wire.store_codec import StoreTier


class MemoryBackend:
    """The host tier; alone it is a whole backend, generations included.

    Invariants: num_bytes is the sum of the values' lengths and at most `capacity_bytes`; each key is in
    exactly one scope's set.
    """

    def __init__(
        self,
        capacity_bytes: int,
        on_evict: Callable[[int], None] = lambda num_blocks: None,
        changes: TierChanges | None = None,
        places: Places | None = None,
    ) -> None:
        """`changes` and `places` hear of every block that comes and goes."""
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[str, tuple[Scope, Value]] = OrderedDict()
        self._keys: dict[Scope, set[str]] = {}
        self._generations: dict[Scope, int] = {}
        self._on_evict = on_evict
        self._changes = changes
        self._places = places

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def has(self, key: str) -> bool:
        return key in self._blocks

    def take(self, key: str) -> Value | None:
        """The value, which becomes the most recently used."""
        entry = self._blocks.get(key)
        if entry is None:
            return None
        self._blocks.move_to_end(key)
        return entry[1]

    def keep(self, scope: Scope, key: str, value: Value) -> bool:
        """False when the value alone exceeds the capacity; else it is kept and older ones make room."""
        if len(value) > self.capacity_bytes:
            self.drop(key)
            return False
        self._forget(key)  # not gone: replaced
        num_evicted = 0
        while self.num_bytes + len(value) > self.capacity_bytes:
            self.drop(next(iter(self._blocks)))
            num_evicted += 1
        if num_evicted:
            self._on_evict(num_evicted)
        self._blocks[key] = (scope, value)
        self._keys.setdefault(scope, set()).add(key)
        self.num_bytes += len(value)
        if self._places is not None:
            self._places.kept(key, value)
        if self._changes is not None:
            self._changes.stored(StoreTier.HOST, key)
        return True

    def drop(self, key: str) -> None:
        if self._forget(key) and self._changes is not None:
            self._changes.removed(StoreTier.HOST, key)

    def _forget(self, key: str) -> bool:
        """Whether it was there."""
        entry = self._blocks.pop(key, None)
        if entry is None:
            return False
        if self._places is not None:
            self._places.left(key)
        scope, value = entry
        self.num_bytes -= len(value)
        keys = self._keys[scope]
        keys.remove(key)
        if not keys:
            del self._keys[scope]
        return True

    def names(self, scope: Scope) -> list[str]:
        return list(self._keys.get(scope, ()))

    def clear(self, scope: Scope) -> int:
        keys = self.names(scope)
        for key in keys:
            self.drop(key)
        return len(keys)

    def check_invariants(self) -> None:
        assert self.num_bytes == sum(len(value) for _, value in self._blocks.values())
        assert self.num_bytes <= self.capacity_bytes
        assert sum(len(keys) for keys in self._keys.values()) == len(self._blocks)
        assert all(key in self._keys[scope] for key, (scope, _) in self._blocks.items())

    async def exists(self, scope: Scope, keys: Sequence[str]) -> Presence:
        return Presence([self.has(key) for key in keys], self._generations.get(scope))

    async def get(self, scope: Scope, keys: Sequence[str]) -> Values:
        return Values([self.take(key) for key in keys], self._generations.get(scope))

    async def put(self, scope: Scope, items: Sequence[tuple[str, Value]]) -> list[bool]:
        return [self.keep(scope, key, value) for key, value in items]

    async def ensure_generation(self, scope: Scope, proposal: int) -> int:
        return self._generations.setdefault(scope, proposal)

    async def advance_generation(self, scope: Scope, proposal: int) -> int:
        generation = self._generations.get(scope, proposal) + 1
        self._generations[scope] = generation
        return generation

    async def delete_stale(self, scope: Scope, generation: int) -> int:
        prefix = f"{scope.namespace}:{generation}:"
        stale = [key for key in self._keys.get(scope, ()) if not key.startswith(prefix)]
        for key in stale:
            self.drop(key)
        return len(stale)
