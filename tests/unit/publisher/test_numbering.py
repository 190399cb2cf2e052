"""Intake numbers: gaps are carried, repeats dropped, epochs told apart."""

import pytest

from reprise_core.errors import DataLoss
from reprise_publisher.numbering import MAX_GAP, REMEMBERED_EPOCHS, Arrival, SourceNumbering
from reprise_wire.event_intake import INTAKE_VERSION, SourceHeader, SourceKind

GOOD = Arrival()


def arrive(
    numbering: SourceNumbering, epoch: bytes, sequence: int, kind: SourceKind = SourceKind.BATCH
) -> Arrival:
    return numbering.arrive(SourceHeader(INTAKE_VERSION, kind, epoch, sequence))


def test_a_story() -> None:
    numbering = SourceNumbering()
    assert arrive(numbering, b"a", 0) == Arrival(new_epoch=True, first=True)
    assert arrive(numbering, b"a", 1) == GOOD
    assert arrive(numbering, b"a", 4) == Arrival(gap=2)
    assert arrive(numbering, b"a", 3).duplicate
    assert arrive(numbering, b"a", 5) == GOOD
    assert arrive(numbering, b"b", 0) == Arrival(new_epoch=True)
    assert arrive(numbering, b"b", 1) == GOOD
    assert arrive(numbering, b"c", 2) == Arrival(new_epoch=True, gap=2)


def test_what_came_before_the_first_message_is_a_gap() -> None:
    assert arrive(SourceNumbering(), b"a", 7) == Arrival(new_epoch=True, first=True, gap=7)


def test_a_hello_names_the_batch_that_comes_next() -> None:
    numbering = SourceNumbering()
    assert arrive(numbering, b"a", 0, SourceKind.HELLO) == Arrival(new_epoch=True, first=True)
    assert arrive(numbering, b"a", 0) == GOOD
    assert arrive(numbering, b"a", 1, SourceKind.HELLO) == GOOD
    # The tail was lost, and no batch shows it.
    assert arrive(numbering, b"a", 3, SourceKind.HELLO) == Arrival(gap=2)
    assert arrive(numbering, b"a", 3) == GOOD


def test_an_epoch_that_was_left_does_not_come_back() -> None:
    numbering = SourceNumbering()
    for number in range(REMEMBERED_EPOCHS + 2):
        arrive(numbering, bytes([number]), 0)
    assert arrive(numbering, bytes([1]), 1) == Arrival(replaced=True)
    assert arrive(numbering, bytes([REMEMBERED_EPOCHS + 1]), 1) == GOOD


def test_a_number_that_cannot_be_changes_nothing() -> None:
    numbering = SourceNumbering()
    arrive(numbering, b"a", 0)
    with pytest.raises(DataLoss):
        arrive(numbering, b"a", MAX_GAP + 2)
    assert arrive(numbering, b"a", 1) == GOOD
