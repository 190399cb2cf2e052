"""The index of the host tier: what it names is true, and what it does not name is only unknown."""

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from reprise_wire.block_transfer import Place
from reprise_wire.host_index import BUCKET_ENTRIES, BUCKET_NBYTES, HostIndex, IndexEntry

NAMES = st.integers(0, 40).map(lambda number: f"n:1:f:1:0:0:{number:064x}")
PLACES = st.builds(Place, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
NUM_BUCKETS = 3


class IndexMachine(RuleBasedStateMachine):
    """Against a dictionary. The reader has nothing but the bytes."""

    def __init__(self) -> None:
        super().__init__()
        table = bytearray(NUM_BUCKETS * BUCKET_NBYTES + 100)
        self.writer = HostIndex(memoryview(table))
        self.reader = HostIndex(memoryview(table).toreadonly())
        self.places: dict[str, Place] = {}
        self.entries: dict[str, IndexEntry] = {}

    @rule(name=NAMES, place=PLACES)
    def put(self, name: str, place: Place) -> None:
        self.writer.put(name, place)
        self.places[name] = place
        assert self.found(name) == place

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.writer.remove(name)
        self.places.pop(name, None)

    @rule(name=NAMES)
    def remember(self, name: str) -> None:
        (entry,) = self.reader.find([name])
        if entry is not None:
            self.entries[name] = entry

    def found(self, name: str) -> Place | None:
        (entry,) = self.reader.find([name])
        return None if entry is None else entry.place

    @invariant()
    def what_it_names_is_true(self) -> None:
        found = {f"n:1:f:1:0:0:{number:064x}" for number in range(41)}
        found = {name for name in found if self.found(name) is not None}
        assert {name: self.found(name) for name in found} == {name: self.places[name] for name in found}
        # A bucket that overflows loses some; one that never did has them all.
        assert len(found) >= min(len(self.places), BUCKET_ENTRIES)

    @invariant()
    def what_was_found_holds_until_it_changes(self) -> None:
        for name, entry in self.entries.items():
            if self.reader.holds(entry):
                assert self.found(name) == self.places.get(name) == entry.place


TestHostIndex = IndexMachine.TestCase
TestHostIndex.settings = hypothesis.settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_bucket_that_is_full_gives_way_to_the_newest() -> None:
    index = HostIndex(memoryview(bytearray(BUCKET_NBYTES)))
    names = [f"name {number}" for number in range(3 * BUCKET_ENTRIES)]
    for number, name in enumerate(names):
        index.put(name, Place(number, 1))
        (entry,) = index.find([name])
        assert entry is not None
        assert entry.place == Place(number, 1)
    assert sum(entry is not None for entry in index.find(names)) == BUCKET_ENTRIES
    for name in names:
        index.remove(name)
    assert not any(index.find(names))


def test_less_than_a_bucket_is_no_index() -> None:
    with pytest.raises(ValueError, match="255 bytes"):
        HostIndex(memoryview(bytearray(BUCKET_NBYTES - 1)))
