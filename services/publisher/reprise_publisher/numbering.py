"""From the source's numbers to the published ones."""

from collections import deque
from dataclasses import dataclass

from reprise_core.errors import DataLoss
from reprise_wire.event_intake import SourceHeader, SourceKind

MAX_GAP = 2**40
"""A jump that no source makes: such a header is damaged."""
REMEMBERED_EPOCHS = 16


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a header means for the published sequence."""

    new_epoch: bool = False
    """The source is another one than before: what it had is gone."""
    first: bool = False
    """No source was heard of before."""
    gap: int = 0
    """Batches that were lost before this message."""
    duplicate: bool = False
    """Of a batch that was here before."""
    replaced: bool = False
    """Of a source that another one has replaced: if it goes on, two of them share one intake."""


_NEXT, _DUPLICATE, _REPLACED = Arrival(), Arrival(duplicate=True), Arrival(replaced=True)


class SourceNumbering:
    """Follows one source at a time, the one whose epoch came last; an epoch that was left never returns.

    Within an epoch batches ascend by one. A higher number means lost ones, a lower one a repeat.
    """

    def __init__(self) -> None:
        self.epoch: bytes | None = None
        self.next = 0
        """The number that the next batch should have."""
        self._left_epochs: deque[bytes] = deque(maxlen=REMEMBERED_EPOCHS)

    def arrive(self, header: SourceHeader) -> Arrival:
        """Of a BATCH, or of any other message, whose number is that of the batch that comes next.

        Raises DataLoss, with nothing changed, for a number that cannot be.
        """
        new_epoch = header.epoch != self.epoch
        if not new_epoch and header.sequence == self.next:
            self.next += header.kind is SourceKind.BATCH
            return _NEXT
        if header.epoch in self._left_epochs:
            return _REPLACED
        expected = 0 if new_epoch else self.next
        if header.sequence - expected > MAX_GAP:
            raise DataLoss(f"event intake sequence {header.sequence}, expected about {expected}")
        if header.sequence < expected:
            return _DUPLICATE
        first = self.epoch is None
        if new_epoch and self.epoch is not None:
            self._left_epochs.append(self.epoch)
        self.epoch = header.epoch
        self.next = header.sequence + (header.kind is SourceKind.BATCH)
        return Arrival(new_epoch=new_epoch, first=first, gap=header.sequence - expected)
