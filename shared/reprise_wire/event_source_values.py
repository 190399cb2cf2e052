"""What goes into and comes out of the following of one event source (`event_source`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import NamedTuple

from reprise_core.errors import InvalidInput
from reprise_core.kv_events import KvEventBatch

MIB = 1024 * 1024


class SourceState(StrEnum):
    EXACT = "exact"
    """What was delivered is the whole state of the publisher as of `sequence`."""
    PARTIAL = "partial"
    """Something is known to be missing, or was never had."""
    OFF = "off"
    """Nothing has come yet, or nothing for longer than the silence limit."""


class DeliveryKind(StrEnum):
    LIVE = "live"
    REPLAY = "replay"
    SNAPSHOT = "snapshot"
    """A part of the publisher's state; the first one begins with AllBlocksCleared."""
    CLEARED = "cleared"
    """No batch of the publisher: all that was delivered of this source is void, for every rank."""


class Delivery(NamedTuple):
    source: str
    kind: DeliveryKind
    sequence: int
    """Of a snapshot part, the sequence of the state; of CLEARED, the last one before."""
    topic: str
    batch: KvEventBatch
    num_bytes: int
    """Of the payload; 0 for CLEARED."""
    unresolved: tuple[int, ...] = ()
    """Of a snapshot part, the places of events whose parent or tokens the publisher does not know."""


class Notice(NamedTuple):
    """Something a person or a log would like to know."""

    source: str
    kind: str
    text: str
    facts: Mapping[str, int | str]


class AskKind(StrEnum):
    REPLAY = "replay"
    SNAPSHOT = "snapshot"


class Ask(NamedTuple):
    """A request that is to be sent on a connection of its own; the former one is void."""

    ask_id: int
    kind: AskKind
    start: int
    """First sequence wanted; only for a replay."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The limits of one source. Times in seconds."""

    snapshots: bool = True
    """Off: only the stream and its replay are wanted."""
    start: int | None = 0
    """Without a snapshot, the first batch to ask a replay for; None = begin with the first live one."""
    snapshot_answer_s: float = 1.0
    """Without a first part for so long, the publisher counts as one that has no snapshots."""
    answer_s: float = 5.0
    """The longest wait for the next message of an answer."""
    max_attempts: int = 4
    """Failed requests in a row after which the hole is accepted and the source partial."""
    backoff_s: float = 0.1
    """Wait after the first failed request; doubles up to `max_backoff_s`."""
    max_backoff_s: float = 5.0
    retry_s: float = 30.0
    """How long a partial source waits before it asks for a snapshot again."""
    buffer_batches: int = 20_000
    """Live batches kept while an answer comes in; at a limit all are dropped and asked for again."""
    buffer_bytes: int = 64 * MIB
    silence_s: float = 0.0
    """A source silent for so long is off; its blocks are kept, so that it can go on where it was. 0 = never,
    as is right for publishers without heartbeats."""
    drop_after_s: float = 60.0
    """After so much more silence its blocks are dropped."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, int | float) and value < 0:
                raise InvalidInput(entry.name, f"{value}, must be at least 0")
        if self.max_attempts < 1:
            raise InvalidInput("max_attempts", f"{self.max_attempts}, must be at least 1")


@dataclass(slots=True)
class SourceCounters:
    live_batches: int = 0
    replayed_batches: int = 0
    snapshot_parts: int = 0
    duplicates: int = 0
    """Batches that a replay or a snapshot had brought already."""
    gaps: int = 0
    """Times that live batches showed others to be missing."""
    holes: int = 0
    """Gaps that nothing could fill."""
    missing_batches: int = 0
    """Batches in those holes, where their number is known."""
    replays: int = 0
    snapshots: int = 0
    failed_asks: int = 0
    """Replays and snapshots that did not end, or not in order."""
    unsupported_snapshots: int = 0
    restarts: int = 0
    """Times that the publisher turned out to be another one than before."""
    connections_lost: int = 0
    overflows: int = 0
    """Times that the buffer of live batches was full and dropped."""
    malformed: int = 0
    unknown_events: int = 0
    silences: int = 0
    drops: int = 0
    """Times that blocks were dropped after a silence."""


def plain_counters(counters: SourceCounters) -> dict[str, int]:
    return {entry.name: getattr(counters, entry.name) for entry in fields(counters)}


@dataclass(slots=True)
class LiveBuffer:
    """Live batches by sequence, bounded by number and bytes."""

    max_batches: int
    max_bytes: int
    batches: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, sequence: int, topic: str, payload: bytes) -> bool:
        """False when it was full: then everything in it has been dropped, this batch too."""
        replaced = self.batches.get(sequence)
        self.num_bytes += len(payload) - (len(replaced[1]) if replaced else 0)
        self.batches[sequence] = topic, payload
        if len(self.batches) <= self.max_batches and self.num_bytes <= self.max_bytes:
            return True
        self.clear()
        return False

    def take(self, sequence: int) -> tuple[str, bytes] | None:
        found = self.batches.pop(sequence, None)
        if found is not None:
            self.num_bytes -= len(found[1])
        return found

    def drop_before(self, sequence: int) -> int:
        """How many there were."""
        old = [number for number in self.batches if number < sequence]
        for number in old:
            self.take(number)
        return len(old)

    @property
    def first(self) -> int | None:
        return min(self.batches, default=None)

    def clear(self) -> None:
        self.batches.clear()
        self.num_bytes = 0
