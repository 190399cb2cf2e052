"""The host tier: least recently used out first, never over its bytes, whatever the order of calls."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from reprise_store.keys import Scope
from reprise_store.memory_backend import MemoryBackend

CAPACITY_BYTES = 100
SCOPES = [Scope("n", "a"), Scope("n", "b")]
KEYS = st.integers(0, 12)


class HostTierMachine(RuleBasedStateMachine):
    """Against a list in order of use, newest last."""

    def __init__(self) -> None:
        super().__init__()
        self.num_evicted = 0
        self.backend = MemoryBackend(CAPACITY_BYTES, self.evicted)
        self.model: list[tuple[str, Scope, bytes]] = []

    def evicted(self, num_blocks: int) -> None:
        self.num_evicted += num_blocks

    @rule(number=KEYS, size=st.integers(1, 120))
    def keep(self, number: int, size: int) -> None:
        key, scope, value = str(number), SCOPES[number % 2], bytes([number]) * size
        self.model = [entry for entry in self.model if entry[0] != key]
        expected = size <= CAPACITY_BYTES
        assert self.backend.keep(scope, key, value) is expected
        if expected:
            self.model.append((key, scope, value))
            while sum(len(kept) for _, _, kept in self.model) > CAPACITY_BYTES:
                self.model.pop(0)

    @rule(number=KEYS)
    def take(self, number: int) -> None:
        found = next((entry for entry in self.model if entry[0] == str(number)), None)
        assert self.backend.take(str(number)) == (found[2] if found else None)
        if found:
            self.model.remove(found)
            self.model.append(found)

    @rule(which=st.integers(0, 1))
    def clear(self, which: int) -> None:
        expected = [entry for entry in self.model if entry[1] == SCOPES[which]]
        assert self.backend.clear(SCOPES[which]) == len(expected)
        self.model = [entry for entry in self.model if entry[1] != SCOPES[which]]

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        self.backend.check_invariants()
        assert [key for key, _, _ in self.model] == list(self.backend._blocks)


TestHostTier = HostTierMachine.TestCase
TestHostTier.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_evictions_are_reported() -> None:
    reported: list[int] = []
    backend = MemoryBackend(10, reported.append)
    for number in range(4):
        backend.keep(SCOPES[0], str(number), b"xxxxx")
    backend.keep(SCOPES[0], "big", b"x" * 10)
    assert reported == [1, 1, 2]
    assert backend.num_blocks == 1


def test_no_capacity_keeps_nothing() -> None:
    backend = MemoryBackend(0)
    assert not backend.keep(SCOPES[0], "k", b"x")
    assert backend.num_blocks == 0
