"""Block values in memory that workers of this machine read: allocated by size, freed by the last view.

`allocate` gives a memoryview; its place is free again when that view and every slice of it are gone. So
whoever reads (a lease, the queue to Redis, a frame that ZMQ has not sent yet) just holds it.

The host tier's index (`host_index`) lies behind them.

Every class of sizes (powers of two) has addresses of its own, which cost nothing: memory is only the pages
that were ever written. A freed place keeps its pages for the next value of its class, until another class
needs them. So nothing fragments, and one model's blocks can follow another's.
"""

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from reprise_runtime.shared_memory import Memory, make_memory, read_into
from reprise_store.ports import Value
from reprise_wire.block_transfer import Place
from reprise_wire.host_index import ENTRY_NBYTES, HostIndex

_PAGE_NBYTES = mmap.PAGESIZE
_MAX_SLOT_NBYTES = 1 << 30
_INDEXED_BLOCK_NBYTES = 32 * 1024
"""The index has an entry for every so many bytes of the budget. With smaller blocks it may lack some."""


@dataclass(slots=True, eq=False)
class _Slot:
    offset: int
    resident_bytes: int = 0
    """Of its pages; they stay when the slot is freed."""
    view: Any = None
    """A weak reference to what its value is read through; tells when that is gone."""


@dataclass(slots=True)
class _SizeClass:
    slot_nbytes: int
    next_offset: int
    warm: list[_Slot]
    """Free, with pages."""
    cold: list[_Slot]
    """Free, without."""


class SharedArena:
    """Invariants: at most `budget_bytes` of pages; each page belongs to one slot, each slot is free or has
    one living view. Any thread may call."""

    def __init__(self, budget_bytes: int, *, on_full: Callable[[], None] = lambda: None) -> None:
        """Raises OSError where the system gives no such memory. `on_full`: a value found no room here."""
        self._budget_bytes = _whole_pages(budget_bytes)
        self.resident_bytes = 0
        self._on_full = on_full
        self._lock = threading.Lock()
        self._freed: deque[_Slot] = deque()
        self._used: dict[int, _Slot] = {}
        self._classes: dict[int, _SizeClass] = {}
        slot_sizes = [
            1 << bits for bits in range(_PAGE_NBYTES.bit_length() - 1, _MAX_SLOT_NBYTES.bit_length())
        ]
        # A slot is at least half full, so twice the budget has addresses for all that fit into it.
        for number, size in enumerate(slot_sizes):
            region_nbytes = 2 * self._budget_bytes
            self._classes[size] = _SizeClass(size, number * region_nbytes, [], [])
        values_nbytes = len(slot_sizes) * 2 * self._budget_bytes
        index_nbytes = _whole_pages(self._budget_bytes // _INDEXED_BLOCK_NBYTES * ENTRY_NBYTES + 1)
        self.index_place = Place(values_nbytes, index_nbytes)
        self.memory: Memory = make_memory("reprise-store", values_nbytes + index_nbytes)
        os.posix_fallocate(self.memory.fd, values_nbytes, index_nbytes)
        self._map = mmap.mmap(self.memory.fd, self.memory.nbytes)
        self._index = HostIndex(memoryview(self._map)[values_nbytes:])
        self._base = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._map))

    def allocate(self, nbytes: int) -> memoryview | None:
        """Writable, with its pages there already; None when there is no room."""
        assert nbytes > 0
        with self._lock:
            slot = self._take(nbytes)
        if slot is None:
            self._on_full()
            return None
        holder = (ctypes.c_ubyte * nbytes).from_buffer(self._map, slot.offset)
        slot.view = weakref.ref(holder, lambda _: self._freed.append(slot))
        return memoryview(holder).cast("B")

    def land(self, value: Value) -> Value:
        """The value in here; as it was given where it is here already or finds no room."""
        if not len(value) or self.place_of(value) is not None:
            return value
        room = self.allocate(len(value))
        if room is None:
            return value
        os.pwrite(self.memory.fd, value, self._offset(room))  # unlike a plain copy, without the GIL
        return room

    def land_from(self, memory: Memory, places: Sequence[Place]) -> list[Value]:
        """Values out of another process's memory, copied here, or into bytes where there is no room.

        Raises OSError when they are not there in full.
        """
        values: list[Value] = []
        for place in places:
            room = self.allocate(place.nbytes) if place.nbytes else None
            target = room if room is not None else bytearray(place.nbytes)
            read_into(memory, place.offset, target)
            values.append(memoryview(target))
        return values

    def place_of(self, value: Value) -> Place | None:
        """Where a value is, if it is here."""
        if not isinstance(value, memoryview) or value.readonly or not value.nbytes:
            return None
        offset = self._offset(value)
        return Place(offset, value.nbytes) if 0 <= offset < self.memory.nbytes else None

    def kept(self, name: str, value: Value) -> None:
        """The host tier has the value: in here, workers find it by themselves."""
        place = self.place_of(value)
        if place is not None:
            self._index.put(name, place)

    def left(self, name: str) -> None:
        self._index.remove(name)

    def check_invariants(self) -> None:
        with self._lock:
            self._collect()
            slots = [*self._used.values()]
            for size_class in self._classes.values():
                slots += size_class.warm
                assert not any(slot.resident_bytes for slot in size_class.cold)
                free = {slot.offset for slot in (*size_class.warm, *size_class.cold)}
                assert len(free) == len(size_class.warm) + len(size_class.cold)
                assert not free & self._used.keys()
            assert self.resident_bytes == sum(slot.resident_bytes for slot in slots) <= self._budget_bytes
            ends = sorted((slot.offset, slot.offset + slot.resident_bytes) for slot in slots)
            assert all(end <= start for (_, end), (start, _) in pairwise(ends))

    def _offset(self, view: memoryview) -> int:
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) - self._base

    def _take(self, nbytes: int) -> _Slot | None:
        self._collect()
        size_class = self._classes.get(max(_PAGE_NBYTES, 1 << (nbytes - 1).bit_length()))
        if size_class is None:
            return None
        slot = size_class.warm.pop() if size_class.warm else None
        wanted_bytes = _whole_pages(nbytes)
        growth = max(0, wanted_bytes - (slot.resident_bytes if slot else 0))
        if not self._make_room(growth):
            if slot is not None:
                size_class.warm.append(slot)
            return None
        slot = slot or (size_class.cold.pop() if size_class.cold else _new_slot(size_class))
        if growth and not self._touch(slot, wanted_bytes):
            (size_class.warm if slot.resident_bytes else size_class.cold).append(slot)
            return None
        self._used[slot.offset] = slot
        return slot

    def _touch(self, slot: _Slot, nbytes: int) -> bool:
        """Gets the pages now, so that a system without memory says so here, and not by a signal."""
        try:
            os.posix_fallocate(self.memory.fd, slot.offset, nbytes)
        except OSError:
            return False
        self.resident_bytes += nbytes - slot.resident_bytes
        slot.resident_bytes = nbytes
        return True

    def _collect(self) -> None:
        while self._freed:
            slot = self._freed.popleft()
            del self._used[slot.offset]
            self._class_of(slot).warm.append(slot)

    def _class_of(self, slot: _Slot) -> _SizeClass:
        number = slot.offset // (2 * self._budget_bytes)
        return self._classes[_PAGE_NBYTES << number]

    def _make_room(self, growth: int) -> bool:
        if self.resident_bytes + growth <= self._budget_bytes:
            return True
        for size_class in self._classes.values():
            while self.resident_bytes + growth > self._budget_bytes and size_class.warm:
                slot = size_class.warm.pop()
                self._map.madvise(mmap.MADV_REMOVE, slot.offset, slot.resident_bytes)
                self.resident_bytes -= slot.resident_bytes
                slot.resident_bytes = 0
                size_class.cold.append(slot)
        return self.resident_bytes + growth <= self._budget_bytes


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES


def _new_slot(size_class: _SizeClass) -> _Slot:
    slot = _Slot(size_class.next_offset)
    size_class.next_offset += size_class.slot_nbytes
    return slot
