"""Blocks on their way to the store.

The step thread copies a block into staging (after that the block may be overwritten); the link's thread
gives it its header and sends it. Where memory is shared the row is the store's to read until it answers;
else the message holds a copy, and the row is free at once.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reprise_core.steps import BlockSave, TransferMeasure
from reprise_wire.block_codec import HEADER_NBYTES, BlockFormat, encode_header
from reprise_wire.block_transfer import TransferHeader, TransferKind, encode_transfer
from reprise_worker.fp8_values import Fp8Values
from reprise_worker.kv_cache import KvCache
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.staging import Staging
from reprise_worker.store_wire import Send, StoreWire, refusal


@dataclass(slots=True)
class _Staged:
    row: int
    save: BlockSave
    encoded: bool = False
    """Whether the row is the value already: one that found no way out is sent again as it is."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """One SAVE message on its way; `rows` are those that the store reads."""

    num_blocks: int
    num_bytes: int
    rows: list[int]
    sent_s: float


class BlockSaves:
    """`stage` belongs to the step thread, the rest to the link's."""

    def __init__(
        self,
        kv: KvCache,
        wire: StoreWire,
        staging: Staging,
        *,
        formats: Sequence[BlockFormat],
        fp8: Fp8Values | None,
        max_in_flight: int,
        timeout_s: float,
        metrics: WorkerMetrics,
        report: Callable[[TransferMeasure], None],
        clock: Callable[[], float],
    ) -> None:
        """`formats`: of values, by adapter id.

        `report` hears of every block that was staged, once, when it is known what came of it."""
        self._kv = kv
        self._wire = wire
        self._staging = staging
        self._max_in_flight = max_in_flight
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._report = report
        self._clock = clock
        self._formats = formats
        self._fp8 = fp8
        self._lock = threading.Lock()
        self._staged: deque[_Staged] = deque()
        self._sent: dict[int, _Sent] = {}

    @property
    def num_staged(self) -> int:
        return len(self._staged)

    @property
    def deadlines_s(self) -> list[float]:
        return [sent.sent_s + self._timeout_s for sent in self._sent.values()]

    def stage(self, saves: Sequence[BlockSave]) -> int:
        """Copies blocks into staging before it returns; answers how many found no room."""
        num_dropped = 0
        for save in saves:
            row = self._staging.take()
            if row is None:
                num_dropped += 1
                continue
            self._kv.export_block(save.block_id, self._staging.block(row), group_id=save.group_id)
            with self._lock:
                self._staged.append(_Staged(row, save))
        self._metrics.saves_dropped.labels("staging").inc(num_dropped)
        self._show()
        return num_dropped

    def pump(self, send: Send, now_s: float) -> None:
        """Sends what the limit allows, and counts what the store has left unanswered for too long."""
        for transfer_id in [
            key for key, sent in self._sent.items() if now_s >= sent.sent_s + self._timeout_s
        ]:
            # A store that reads a row after this gets another block's bytes, and whoever loads them
            # refuses them by their checksum.
            self._end(transfer_id, "timeout")
        while self._send_one(send, now_s):
            pass

    def saved(self, header: TransferHeader) -> None:
        sent = self._sent.pop(header.transfer_id, None)
        if sent is None:
            return  # counted as timed out
        self._give_back(sent.rows)
        num_accepted = sum(header.accepted)
        self._measure(sent, num_accepted)
        self._metrics.saves.inc(num_accepted)
        self._metrics.saves_dropped.labels("store").inc(max(0, sent.num_blocks - num_accepted))

    def refused(self, header: TransferHeader) -> None:
        if header.transfer_id in self._sent:
            self._end(header.transfer_id, refusal(header.reason))

    def store_left(self) -> None:
        """The connection broke: no answer will come to what was sent."""
        for transfer_id in list(self._sent):
            self._end(transfer_id, "unavailable")

    def drop_staged(self, reason: str) -> None:
        with self._lock:
            dropped = list(self._staged)
            self._staged.clear()
        if not dropped:
            return
        self._metrics.saves_failed.labels(reason).inc(len(dropped))
        self._report(TransferMeasure(len(dropped), 0, 0.0))
        self._give_back([item.row for item in dropped])

    def _send_one(self, send: Send, now_s: float) -> bool:
        """Sends one SAVE message of one keyspace and generation; False when there is nothing or no way to."""
        in_flight = sum(sent.num_blocks for sent in self._sent.values())
        room = min(self._wire.blocks_per_message, self._max_in_flight - in_flight)
        with self._lock:
            staged = _alike(self._staged, room)
        if not staged:
            return False
        keys = tuple(self._wire.key(item.save.group_id, item.save.block_hash) for item in staged)
        values = [self._value(item) for item in staged]
        rows = [item.row for item in staged]
        shared = self._wire.memory is not None and self._staging.memory is not None
        nbytes = self._formats[0].payload_nbytes
        places = tuple(self._staging.place(row, nbytes) for row in rows) if shared else ()
        first = staged[0].save
        header = self._wire.header(
            TransferKind.SAVE, keys, first.generation, adapter_id=first.adapter_id, places=places
        )
        if not send([encode_transfer(header), *([] if shared else values)]):
            return False
        with self._lock:
            for _ in staged:
                self._staged.popleft()
        num_bytes = sum(value.nbytes for value in values)
        self._sent[header.transfer_id] = _Sent(len(staged), num_bytes, rows if shared else [], now_s)
        self._metrics.save_bytes.inc(num_bytes)
        self._give_back([] if shared else rows)
        return True

    def _value(self, item: _Staged) -> memoryview:
        """The staged block as it is stored, with its header written before it."""
        format = self._formats[item.save.adapter_id]
        value = self._staging.value(item.row, format.payload_nbytes)
        if not item.encoded:
            if self._fp8 is not None:
                self._fp8.encode(self._staging.block(item.row))
            value[:HEADER_NBYTES] = encode_header(
                value[HEADER_NBYTES:], block_hash=item.save.block_hash, format=format
            )
            item.encoded = True
        return value

    def _end(self, transfer_id: int, reason: str) -> None:
        sent = self._sent.pop(transfer_id)
        self._metrics.saves_failed.labels(reason).inc(sent.num_blocks)
        self._give_back(sent.rows)
        self._measure(sent, 0)

    def _measure(self, sent: _Sent, num_accepted: int) -> None:
        num_bytes = sent.num_bytes * num_accepted // sent.num_blocks
        self._report(TransferMeasure(sent.num_blocks, num_bytes, self._clock() - sent.sent_s))

    def _give_back(self, rows: list[int]) -> None:
        self._staging.give_back(rows)
        self._show()

    def _show(self) -> None:
        self._metrics.staging_blocks_used.set(self._staging.num_used)


def _alike(staged: deque[_Staged], limit: int) -> list[_Staged]:
    """The first staged saves, as many as share the first one's generation and adapter, at most `limit`."""
    taken: list[_Staged] = []
    for item in staged:
        save, first = item.save, staged[0].save
        if len(taken) >= limit or (save.generation, save.adapter_id) != (first.generation, first.adapter_id):
            break
        taken.append(item)
    return taken
