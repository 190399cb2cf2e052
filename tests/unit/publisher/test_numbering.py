"""Intake numbers: gaps are carried, repeats dropped, epochs told apart."""

import pytest

from reprise_core.errors import DataLoss
from reprise_publisher.numbering import MAX_GAP, Arrival, IntakeNumbering
from reprise_wire.event_intake import INTAKE_VERSION, IntakeHeader

GOOD = Arrival(new_epoch=False, gap=0)


def arrive(numbering: IntakeNumbering, epoch: bytes, sequence: int) -> Arrival:
    return numbering.arrive(IntakeHeader(INTAKE_VERSION, epoch, sequence))


def test_a_story() -> None:
    numbering = IntakeNumbering()
    assert arrive(numbering, b"a", 0) == GOOD
    assert arrive(numbering, b"a", 1) == GOOD
    assert arrive(numbering, b"a", 4) == Arrival(new_epoch=False, gap=2)
    assert arrive(numbering, b"a", 3).duplicate
    assert arrive(numbering, b"a", 5) == GOOD
    assert arrive(numbering, b"b", 0) == Arrival(new_epoch=True, gap=0)
    assert arrive(numbering, b"b", 1) == GOOD
    assert arrive(numbering, b"c", 2) == Arrival(new_epoch=True, gap=2)


def test_the_first_epoch_is_not_new_and_what_came_before_is_lost() -> None:
    assert arrive(IntakeNumbering(), b"a", 7) == Arrival(new_epoch=False, gap=7)


def test_a_number_that_cannot_be_changes_nothing() -> None:
    numbering = IntakeNumbering()
    arrive(numbering, b"a", 0)
    for sequence in (-1, MAX_GAP + 2):
        with pytest.raises(DataLoss):
            arrive(numbering, b"a", sequence)
    assert arrive(numbering, b"a", 1) == GOOD
