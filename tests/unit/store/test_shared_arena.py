"""The arena: no page is in two places, no place is reused while somebody reads, bytes are conserved."""

import os
import resource

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reprise_runtime.shared_memory import Memory, make_memory, read_into
from reprise_store.adapters.shared_arena import SharedArena
from reprise_store.keys import Scope
from reprise_store.memory_backend import MemoryBackend
from reprise_wire.block_transfer import Place
from reprise_wire.host_index import HostIndex

KIB = 1024
SCOPE = Scope("n", "a")
BUDGET_BYTES = 128 * KIB
SIZES = st.sampled_from([1, 4096, 4097, 9000, 20_000, 33_000, 70_000])


def read(arena: SharedArena, place: Place) -> bytes:
    """As a worker does it."""
    target = bytearray(place.nbytes)
    read_into(arena.memory, place.offset, target)
    return bytes(target)


class ArenaMachine(RuleBasedStateMachine):
    """A host tier in an arena, workers that hold leases, and a queue to Redis, against plain bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_full = 0
        self.arena = SharedArena(BUDGET_BYTES, on_full=self.full)
        self.host = MemoryBackend(96 * KIB, places=self.arena)
        place = self.arena.index_place
        self.index = HostIndex(self.arena.memory.view(place.offset, place.nbytes))
        self.content: dict[str, bytes] = {}
        self.leases: list[list[tuple[memoryview, Place, bytes]]] = []
        self.queue: list[tuple[memoryview, bytes]] = []

    def full(self) -> None:
        self.num_full += 1

    @rule(number=st.integers(0, 9), size=SIZES, filler=st.integers(1, 255), queued=st.booleans())
    def save(self, number: int, size: int, filler: int, queued: bool) -> None:
        value = bytes([filler]) * size
        kept = self.arena.land(value)
        assert bytes(kept) == value
        self.host.keep(SCOPE, str(number), kept)
        self.content[str(number)] = value
        if queued and isinstance(kept, memoryview):
            self.queue.append((kept[: size // 2 + 1], value[: size // 2 + 1]))

    @rule(numbers=st.lists(st.integers(0, 9), max_size=4))
    def load(self, numbers: list[int]) -> None:
        lease = []
        for number in numbers:
            value = self.host.take(str(number))
            place = None if value is None else self.arena.place_of(value)
            if isinstance(value, memoryview) and place is not None:
                lease.append((value, place, self.content[str(number)]))
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        self.leases.pop(which % len(self.leases))

    @rule()
    def every_worker_dies(self) -> None:
        self.leases.clear()

    @rule()
    def redis_takes_all(self) -> None:
        self.queue.clear()

    @rule()
    def reset(self) -> None:
        self.host.clear(SCOPE)

    @invariant()
    def nothing_leased_or_queued_changes(self) -> None:
        for lease in self.leases:
            for _, place, content in lease:
                assert read(self.arena, place) == content
        for view, content in self.queue:
            assert view == content

    @invariant()
    def the_index_names_what_the_host_tier_has_here(self) -> None:
        for number in range(10):
            (entry,), value = self.index.find([str(number)]), self.host.take(str(number))
            assert (entry.place if entry else None) == (None if value is None else self.arena.place_of(value))
            assert entry is None or read(self.arena, entry.place) == self.content[str(number)]

    @invariant()
    def bytes_are_conserved(self) -> None:
        self.arena.check_invariants()
        self.host.check_invariants()
        pages = os.fstat(self.arena.memory.fd).st_blocks * 512 - self.arena.index_place.nbytes
        assert pages == self.arena.resident_bytes <= BUDGET_BYTES

    def teardown(self) -> None:
        self.leases.clear()
        self.queue.clear()
        self.host.clear(SCOPE)
        self.arena.check_invariants()
        assert not self.arena._used


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_a_place_is_free_when_the_last_view_of_it_is_gone() -> None:
    arena = SharedArena(64 * KIB)
    first = arena.allocate(60 * KIB)
    assert first is not None
    part = first[100:200]
    del first
    assert arena.allocate(8 * KIB) is None
    del part
    assert arena.allocate(60 * KIB) is not None


def test_pages_go_from_one_model_to_another() -> None:
    arena = SharedArena(64 * KIB)
    small = [arena.allocate(4 * KIB) for _ in range(16)]
    assert all(small)
    assert arena.allocate(1) is None
    small.clear()
    assert arena.allocate(40 * KIB) is not None
    arena.check_invariants()


def test_values_come_out_of_a_workers_memory() -> None:
    arena = SharedArena(32 * KIB)
    theirs = make_memory("worker", 64 * KIB)
    os.pwrite(theirs.fd, b"x" * 20_000 + b"y" * 20_000, 0)
    values = arena.land_from(theirs, [Place(0, 20_000), Place(20_000, 20_000), Place(5, 0)])
    assert [bytes(value) for value in values] == [b"x" * 20_000, b"y" * 20_000, b""]
    # The second found no room and is a copy of its own.
    assert [arena.place_of(value) is not None for value in values] == [True, False, False]


@pytest.mark.parametrize("place", [Place(60 * KIB, 8 * KIB), Place(1 << 40, 10)])
def test_places_beyond_a_workers_memory_are_refused(place: Place) -> None:
    with pytest.raises(OSError, match="bytes at"):
        SharedArena(32 * KIB).land_from(make_memory("worker", 64 * KIB), [place])


def test_a_system_that_gives_no_memory_says_so_at_once() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (KIB, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            SharedArena(64 * KIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_memory_that_runs_out_later_leaves_values_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    num_full = []
    arena = SharedArena(64 * KIB, on_full=lambda: num_full.append(1))
    here = arena.land(b"a" * 5000)

    def no_space(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    value = b"b" * 20_000
    assert arena.land(value) is value
    assert num_full == [1]
    arena.check_invariants()
    assert bytes(here) == b"a" * 5000
    del here
    assert arena.place_of(arena.land(b"c" * 5000)) is not None  # pages that are there already


def test_a_closed_descriptor_is_not_read_under_another_file() -> None:
    memory: Memory | None = make_memory("worker", KIB)
    assert memory is not None
    fd = memory.fd
    holder = memory
    memory = None
    assert os.fstat(fd).st_size == KIB
    del holder
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
