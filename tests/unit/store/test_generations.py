"""What a store knows, makes up and proposes as a scope's generation."""

from itertools import count

import pytest

from reprise_store import generations
from reprise_store.generations import Generations
from reprise_store.keys import Scope

SCOPE = Scope("n", "a")


def make() -> Generations:
    numbers = count(1000)
    return Generations(lambda: next(numbers))


def test_a_made_up_generation_stays_and_may_become_the_real_one() -> None:
    known = make()
    assert known.get(SCOPE) is None
    made_up = known.provisional(SCOPE)
    assert known.provisional(SCOPE) == made_up
    assert known.proposal(SCOPE) == made_up
    assert not known.learn(SCOPE, made_up)


def test_a_real_generation_that_got_lost_is_never_proposed_again() -> None:
    known = make()
    known.learn(SCOPE, 7)
    assert known.provisional(SCOPE) == 7
    assert known.proposal(SCOPE) != 7


def test_a_change_is_told() -> None:
    known = make()
    assert not known.learn(SCOPE, 7)
    assert not known.learn(SCOPE, 7)
    assert known.learn(SCOPE, 8)
    assert known.get(SCOPE) == 8


def test_the_longest_unused_scope_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "MAX_SCOPES", 2)
    known = make()
    scopes = [Scope("n", str(i)) for i in range(3)]
    known.provisional(scopes[0])
    known.learn(scopes[1], 1)
    known.learn(scopes[0], 5)
    known.learn(scopes[2], 2)
    assert [known.get(scope) for scope in scopes] == [5, None, 2]
