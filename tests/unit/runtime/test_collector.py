"""What lives long is passed over by the cycle collector, and is freed when it was replaced."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from reprise_runtime.collector import YOUNG_OBJECTS, spare_long_lived


class Node:
    """Two of them that know each other are freed by the collector alone."""

    def __init__(self) -> None:
        self.other: Node | None = None


def pair() -> Node:
    first, second = Node(), Node()
    first.other, second.other = second, first
    return first


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_what_was_there_is_not_visited_any_more_and_freed_after_the_next_call() -> None:
    pool = pair()
    gone = weakref.ref(pool)
    spare_long_lived()
    assert gc.get_freeze_count() > 0
    assert not any(one is pool for one in gc.get_objects())
    assert gc.get_threshold()[0] == YOUNG_OBJECTS
    del pool
    gc.collect()
    assert gone() is not None
    spare_long_lived()
    assert gone() is None


def test_what_comes_later_is_collected_as_ever() -> None:
    spare_long_lived()
    later = pair()
    gone = weakref.ref(later)
    del later
    gc.collect()
    assert gone() is None
