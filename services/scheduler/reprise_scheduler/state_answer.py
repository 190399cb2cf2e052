"""The state of the caches in chunks, for a publisher that asks for it."""

import time
from dataclasses import dataclass

from reprise_core.block_record import FrozenRecord
from reprise_core.kv_events import KvEvent, KvEventBatch
from reprise_wire.event_codec import encode_batch
from reprise_wire.event_intake import StateChunk, state_frames

BLOCKS_PER_EVENT = 64
BLOCKS_PER_CHUNK = 256
"""Making a chunk takes about half a millisecond, in which no step is planned."""
CHUNKS_IN_FLIGHT = 8
"""Sent and not acknowledged: live batches find the queue to the publisher as good as empty."""


@dataclass(frozen=True, slots=True)
class StateSource:
    """Whose state it is, and which batch is the first that it does not contain."""

    epoch: bytes
    sequence: int
    rank: int
    complete: bool


class StateAnswer:
    """One answer on its way. Invariant: at most CHUNKS_IN_FLIGHT chunks are not acknowledged."""

    def __init__(self, state_id: int, record: FrozenRecord, source: StateSource, *, now_s: float) -> None:
        self._state_id = state_id
        self._record = record
        self._source = source
        self._states = record.stores(BLOCKS_PER_EVENT)
        self._following = next(self._states, None)
        self._message: list[bytes] | None = None
        self._num_sent = 0
        self._num_acknowledged = 0
        self._last_made = False
        self.progress_s = now_s

    @property
    def done(self) -> bool:
        return self._last_made and self._message is None

    @property
    def may_send(self) -> bool:
        return not self.done and self._num_sent - self._num_acknowledged < CHUNKS_IN_FLIGHT

    def message(self) -> list[bytes]:
        """The next chunk's frames; the same until it is `sent`."""
        if self._message is None:
            self._message = self._make()
        return self._message

    def sent(self) -> None:
        self._message = None
        self._num_sent += 1

    def acknowledge(self, state_id: int, index: int, *, now_s: float) -> None:
        if state_id == self._state_id and self._num_acknowledged <= index < self._num_sent:
            self._num_acknowledged = index + 1
            self.progress_s = now_s

    def _make(self) -> list[bytes]:
        events: list[KvEvent] = []
        num_blocks = 0
        while self._following is not None and num_blocks < BLOCKS_PER_CHUNK:
            events.append(self._following.event)
            num_blocks += len(self._following.event.block_hashes)
            self._following = next(self._states, None)
        self._last_made = self._following is None
        chunk = StateChunk(
            state_id=self._state_id,
            index=self._num_sent,
            last=self._last_made,
            num_blocks=self._record.num_blocks,
            num_unresolved=self._record.num_unresolved,
            complete=self._source.complete,
        )
        payload = encode_batch(KvEventBatch(time.time(), tuple(events), self._source.rank))
        return state_frames(self._source.epoch, self._source.sequence, chunk, payload)
