"""From the scheduler's numbers to the published ones."""

from dataclasses import dataclass

from reprise_core.errors import DataLoss
from reprise_wire.event_intake import IntakeHeader

MAX_GAP = 2**40
"""A jump that no scheduler makes: such a header is damaged."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a batch's header means for the published sequence."""

    new_epoch: bool
    """The scheduler is another one than before: what it had is gone."""
    gap: int
    """Batches that were lost before this one; their numbers stay unused."""
    duplicate: bool = False


class IntakeNumbering:
    """Follows one scheduler at a time.

    Within an epoch sequences ascend by one. A higher one means lost batches, a lower one a repeat. A
    publisher that joins late misses the batches before: they count as lost too, so that nobody takes
    what follows for the whole state.
    """

    def __init__(self) -> None:
        self._epoch: bytes | None = None
        self._next = 0

    def arrive(self, header: IntakeHeader) -> Arrival:
        """Raises DataLoss for a number that cannot be."""
        new_epoch = header.epoch != self._epoch
        expected = 0 if new_epoch else self._next
        if header.sequence < 0 or header.sequence - expected > MAX_GAP:
            raise DataLoss(f"event intake sequence {header.sequence}, expected about {expected}")
        if header.sequence < expected:
            return Arrival(new_epoch=False, gap=0, duplicate=True)
        first_ever = self._epoch is None
        self._epoch = header.epoch
        self._next = header.sequence + 1
        return Arrival(new_epoch=new_epoch and not first_ever, gap=header.sequence - expected)
