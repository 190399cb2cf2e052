"""Whether what was delivered of a source has no hole."""

from reprise_core.kv_events import AllBlocksCleared, KvEventBatch


class Wholeness:
    """`is_whole` is lost with a hole, and comes back when every rank that was seen has said that it is
    cleared, or with the start of a stream, or with a snapshot."""

    def __init__(self) -> None:
        self.is_whole = False
        self._ranks: set[int | None] = set()
        self._cleared: set[int | None] = set()

    def see(self, batch: KvEventBatch) -> None:
        """A batch that is delivered."""
        self._ranks.add(batch.data_parallel_rank)
        if not self.is_whole and is_cleared(batch):
            self._cleared.add(batch.data_parallel_rank)
            self.is_whole = self._ranks <= self._cleared

    def is_made_by(self, batch: KvEventBatch) -> bool:
        """Whether nothing before this batch matters after it."""
        return is_cleared(batch) and self._ranks <= {batch.data_parallel_rank}

    def lose(self) -> None:
        self.is_whole = False
        self._cleared = set()

    def start(self) -> None:
        """Nothing is delivered yet, of no rank."""
        self.lose()
        self._ranks = set()


def is_cleared(batch: KvEventBatch) -> bool:
    return any(type(event) is AllBlocksCleared for event in batch.events)
