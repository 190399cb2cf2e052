"""The questions to one source: one at a time, each with a time limit, failed ones again after a while."""

from reprise_wire.event_snapshot import SnapshotMeta
from reprise_wire.event_source_values import Ask, AskKind, SourceCounters, SourceOptions


class Asks:
    """Invariant: while a retry waits there is no current question."""

    def __init__(self, options: SourceOptions, counters: SourceCounters) -> None:
        self._options = options
        self._counters = counters
        self._num_asked = 0
        self._part_index = 0
        self._part_sequence = 0
        self.current: Ask | None = None
        self.has_snapshots: bool | None = None if options.snapshots else False
        """None until the publisher has answered, or not, on this connection."""
        self.num_failed = 0
        """In a row."""
        self.deadline_s = 0.0
        self.retry_at_s: float | None = None

    @property
    def is_busy(self) -> bool:
        return self.current is not None or self.retry_at_s is not None

    @property
    def awaits_snapshot(self) -> bool:
        """A snapshot was asked for, and nothing of it has come."""
        return self.current is not None and self.current.kind is AskKind.SNAPSHOT and not self._part_index

    def is_current(self, ask_id: int) -> bool:
        return self.current is not None and self.current.ask_id == ask_id

    def send(self, kind: AskKind, start: int, *, now_s: float) -> None:
        is_snapshot = kind is AskKind.SNAPSHOT
        self._num_asked += 1
        self.current = Ask(self._num_asked, kind, start)
        self.retry_at_s = None
        self._part_index = 0
        self.deadline_s = now_s + (self._options.snapshot_answer_s if is_snapshot else self._options.answer_s)
        self._counters.snapshots += is_snapshot
        self._counters.replays += not is_snapshot

    def answered(self, *, now_s: float) -> None:
        """A message of the answer has come."""
        self.deadline_s = now_s + self._options.answer_s

    def is_next_part(self, meta: SnapshotMeta) -> bool:
        """Whether this is the part of the snapshot that follows; then the one after it is awaited."""
        self.has_snapshots = True
        if meta.index != self._part_index or (meta.index and meta.sequence != self._part_sequence):
            return False
        self._part_index, self._part_sequence = meta.index + 1, meta.sequence
        return True

    def end(self) -> None:
        self.current = None

    def drop(self) -> None:
        self.current = None
        self.retry_at_s = None

    def connection_lost(self) -> None:
        self.drop()
        if self._options.snapshots and self.has_snapshots is False:
            self.has_snapshots = None

    def fail(self, *, now_s: float) -> bool:
        """The question came to nothing. False when it was the last attempt, else it is asked again."""
        options = self._options
        self.current = None
        self._counters.failed_asks += 1
        self.num_failed += 1
        if self.num_failed >= options.max_attempts:
            return False
        self.retry_at_s = now_s + min(options.backoff_s * 2 ** (self.num_failed - 1), options.max_backoff_s)
        return True

    def is_overdue(self, *, now_s: float) -> bool:
        return self.current is not None and now_s >= self.deadline_s

    def take_retry(self, *, now_s: float) -> bool:
        """True once when the wait after a failure is over."""
        if self.retry_at_s is None or now_s < self.retry_at_s:
            return False
        self.retry_at_s = None
        return True
