"""Blocks to and from the store, beside the steps.

Saves: the step thread copies a block into a bounded staging buffer (after that the block may be
overwritten), the link's thread gives it its header and sends it. Loads: the link's thread asks for
values, checks each, and copies it into the cache; every load ends in exactly one `LoadReport`
unless its session ends first. The scheduler keeps a load's blocks out of use until the report.

`save`, `load` and `begin_session` belong to the step thread; `pump`, `receive` and `next_deadline_s`
to the link's thread. The lock guards what both touch, and is held while a block is written, so that
nothing of a session is written after it has ended.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from reprise_core.errors import DataLoss
from reprise_core.ids import BlockHash
from reprise_core.steps import BlockLoad, BlockSave, LoadReport, pack_ids, unpack_ids
from reprise_wire.block_codec import HEADER_NBYTES, BadBlock, decode_block, encode_header
from reprise_wire.block_transfer import (
    TRANSFER_VERSION,
    BlockKey,
    Keyspace,
    TransferHeader,
    TransferKind,
    decode_transfer,
    encode_transfer,
)
from reprise_worker.kv_cache import KvCache
from reprise_worker.metrics import WorkerMetrics

MAX_BLOCKS_PER_MESSAGE = 16
# Puts the payload behind the 44-byte header on a 64-byte boundary.
_ROW_PADDING = 64 - HEADER_NBYTES

Frame = bytes | memoryview
Send = Callable[[Sequence[Frame]], bool]
"""Sends without waiting; False when the peer is away or its queue is full."""


@dataclass(frozen=True, slots=True)
class TransferLimits:
    staging_bytes: int
    max_saves_in_flight: int
    max_pending_loads: int
    max_load_blocks_in_flight: int
    load_timeout_s: float
    save_timeout_s: float


@dataclass(slots=True)
class _StagedSave:
    row: int
    save: BlockSave


@dataclass(slots=True)
class _Load:
    """Invariant: the load has ended when all of it was asked for and nothing is outstanding."""

    session: bytes
    load: BlockLoad
    block_ids: list[int]
    started_s: float
    num_asked: int = 0
    num_outstanding: int = 0
    failed: list[int] = field(default_factory=list)
    reason: str = ""

    def fail(self, block_ids: Sequence[int], reason: str) -> None:
        self.failed += block_ids
        self.reason = self.reason or reason

    @property
    def ended(self) -> bool:
        return self.num_asked == len(self.block_ids) and self.num_outstanding == 0


@dataclass(slots=True)
class _AskedBlocks:
    """One LOAD message on its way."""

    job: _Load
    first: int
    keys: tuple[BlockKey, ...]


class Transfers:
    def __init__(
        self,
        kv: KvCache,
        *,
        keyspace: Keyspace,
        rank: int,
        limits: TransferLimits,
        metrics: WorkerMetrics,
        report: Callable[[bytes, tuple[LoadReport, ...]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kv = kv
        self._keyspace = keyspace
        self._fingerprint = bytes.fromhex(keyspace.fingerprint)
        self._rank = rank
        self._limits = limits
        self._metrics = metrics
        self._report = report
        self._wake: Callable[[], None] = lambda: None
        self._clock = clock
        self._lock = threading.Lock()
        self._session = b""
        row_nbytes = -(-(_ROW_PADDING + HEADER_NBYTES + kv.block_nbytes) // 64) * 64
        num_rows = max(1, limits.staging_bytes // row_nbytes)
        pinned = kv.keys[0].is_cuda
        self._rows = torch.empty((num_rows, row_nbytes), dtype=torch.uint8, pin_memory=pinned)
        self._free_rows = list(range(num_rows))
        self._staged: deque[_StagedSave] = deque()
        self._loads: deque[_Load] = deque()
        self._num_pending_loads = 0
        self._sent_saves: dict[int, tuple[int, float]] = {}  # transfer id -> blocks, deadline
        self._asked: dict[int, _AskedBlocks] = {}
        self._jobs: list[_Load] = []  # loads of which something was or will be asked
        self._last_transfer_id = 0

    def wake_with(self, wake: Callable[[], None]) -> None:
        """How the link is told that there is something to send."""
        self._wake = wake

    # The step thread's side.

    def begin_session(self, session: bytes) -> None:
        """Drops the loads of an earlier session; staged saves stay, their content is right anyway."""
        with self._lock:
            self._session = session
            self._loads.clear()
            self._num_pending_loads = 0
            self._metrics.loads_pending.set(0)

    def save(self, saves: Sequence[BlockSave]) -> int:
        """Copies blocks into staging before it returns; answers how many found no room."""
        num_dropped = 0
        for save in saves:
            with self._lock:
                row = self._free_rows.pop() if self._free_rows else None
            if row is None:
                num_dropped += 1
                continue
            start = _ROW_PADDING + HEADER_NBYTES
            self._kv.export_block(save.block_id, self._rows[row, start : start + self._kv.block_nbytes])
            with self._lock:
                self._staged.append(_StagedSave(row, save))
        self._metrics.saves_dropped.labels("staging").inc(num_dropped)
        self._metrics.staging_blocks_used.set(len(self._rows) - len(self._free_rows))
        self._wake()
        return num_dropped

    def load(self, loads: Sequence[BlockLoad]) -> None:
        now_s = self._clock()
        refused: list[_Load] = []
        with self._lock:
            session = self._session
            for load in loads:
                job = _Load(session, load, unpack_ids(load.block_ids), now_s)
                if self._num_pending_loads >= self._limits.max_pending_loads:
                    job.fail(job.block_ids, "unavailable")
                    refused.append(job)
                    continue
                self._num_pending_loads += 1
                self._loads.append(job)
            self._metrics.loads_pending.set(self._num_pending_loads)
        for job in refused:
            self._send_report(job)
        self._wake()

    # The link thread's side.

    def pump(self, send: Send) -> None:
        """Sends what the limits allow, and ends what has timed out."""
        now_s = self._clock()
        self._take_new_loads()
        self._expire(now_s)
        while self._ask_blocks(send):
            pass
        while self._send_staged(send, now_s):
            pass

    def next_deadline_s(self) -> float | None:
        """On the clock's scale; None when nothing is in flight."""
        deadlines = [job.started_s + self._limits.load_timeout_s for job in self._jobs]
        deadlines += [deadline_s for _, deadline_s in self._sent_saves.values()]
        return min(deadlines, default=None)

    @property
    def has_unsent(self) -> bool:
        """Whether `pump` left something unsent that an answer will not bring along: the peer is away."""
        return bool(self._staged) or any(job.num_asked < len(job.block_ids) for job in self._jobs)

    def receive(self, frames: Sequence[Frame]) -> None:
        """Raises DataLoss for frames that are no message of this protocol."""
        header = decode_transfer(frames)
        if header.kind == TransferKind.SAVED:
            self._saved(header)
        elif header.kind == TransferKind.LOADED:
            self._loaded(header, frames[1:])
        elif header.kind == TransferKind.REFUSED:
            self._refused(header)
        else:
            raise DataLoss(f"transfer: a store does not send {header.kind!r}")

    def _take_new_loads(self) -> None:
        with self._lock:
            session = self._session
            self._jobs += self._loads
            self._loads.clear()
        # Loads of an ended session: no report, and late values find no job.
        self._jobs = [job for job in self._jobs if job.session == session]
        self._asked = {key: asked for key, asked in self._asked.items() if asked.job.session == session}

    def _expire(self, now_s: float) -> None:
        expired = [job for job in self._jobs if now_s >= job.started_s + self._limits.load_timeout_s]
        for job in expired:
            for transfer_id in [key for key, asked in self._asked.items() if asked.job is job]:
                asked = self._asked.pop(transfer_id)
                job.num_outstanding -= len(asked.keys)
                job.fail(job.block_ids[asked.first : asked.first + len(asked.keys)], "timeout")
            job.fail(job.block_ids[job.num_asked :], "unavailable")
            job.num_asked = len(job.block_ids)
            self._end(job)
        for transfer_id, (num_blocks, deadline_s) in list(self._sent_saves.items()):
            if now_s >= deadline_s:
                del self._sent_saves[transfer_id]
                self._metrics.saves_failed.labels("timeout").inc(num_blocks)

    def _ask_blocks(self, send: Send) -> bool:
        """Sends one LOAD message; False when there is nothing to ask or no way to."""
        in_flight = sum(len(asked.keys) for asked in self._asked.values())
        room = min(MAX_BLOCKS_PER_MESSAGE, self._limits.max_load_blocks_in_flight - in_flight)
        job = next((job for job in self._jobs if job.num_asked < len(job.block_ids)), None)
        if job is None or room <= 0:
            return False
        first = job.num_asked
        hashes = job.load.block_hashes[first : first + room]
        keys = tuple(BlockKey(self._rank, job.load.group_id, block_hash) for block_hash in hashes)
        header = self._header(TransferKind.LOAD, keys, job.load.generation)
        if not send([encode_transfer(header)]):
            return False
        self._asked[header.transfer_id] = _AskedBlocks(job, first, keys)
        job.num_asked += len(keys)
        job.num_outstanding += len(keys)
        return True

    def _send_staged(self, send: Send, now_s: float) -> bool:
        """Sends one SAVE message of one generation; False when there is nothing or no way to."""
        in_flight = sum(num_blocks for num_blocks, _ in self._sent_saves.values())
        room = min(MAX_BLOCKS_PER_MESSAGE, self._limits.max_saves_in_flight - in_flight)
        with self._lock:
            staged = _same_generation(self._staged, room)
        if not staged:
            return False
        keys = tuple(BlockKey(self._rank, item.save.group_id, item.save.block_hash) for item in staged)
        header = self._header(TransferKind.SAVE, keys, staged[0].save.generation)
        values = [self._value(item) for item in staged]
        if not send([encode_transfer(header), *values]):
            return False
        with self._lock:
            for item in staged:
                self._staged.popleft()
                self._free_rows.append(item.row)
            self._metrics.staging_blocks_used.set(len(self._rows) - len(self._free_rows))
        self._sent_saves[header.transfer_id] = (len(staged), now_s + self._limits.save_timeout_s)
        self._metrics.save_bytes.inc(sum(value.nbytes for value in values))
        return True

    def _value(self, item: _StagedSave) -> memoryview:
        """The staged block with its header written before it."""
        row = self._rows[item.row].numpy().data
        end = _ROW_PADDING + HEADER_NBYTES + self._kv.block_nbytes
        value = row[_ROW_PADDING:end]
        value[:HEADER_NBYTES] = encode_header(
            value[HEADER_NBYTES:],
            block_hash=item.save.block_hash,
            num_tokens=self._kv.block_size,
            fingerprint=self._fingerprint,
        )
        return value

    def _header(self, kind: TransferKind, keys: tuple[BlockKey, ...], generation: int) -> TransferHeader:
        self._last_transfer_id += 1
        return TransferHeader(
            TRANSFER_VERSION, kind, self._last_transfer_id, self._keyspace, generation, keys
        )

    def _saved(self, header: TransferHeader) -> None:
        sent = self._sent_saves.pop(header.transfer_id, None)
        if sent is None:
            return  # counted as timed out
        num_accepted = sum(header.accepted)
        self._metrics.saves.inc(num_accepted)
        self._metrics.saves_dropped.labels("store").inc(max(0, sent[0] - num_accepted))

    def _refused(self, header: TransferHeader) -> None:
        sent = self._sent_saves.pop(header.transfer_id, None)
        if sent is not None:
            self._metrics.saves_failed.labels(_refusal(header.reason)).inc(sent[0])
        asked = self._asked.pop(header.transfer_id, None)
        if asked is not None:
            blocks = asked.job.block_ids[asked.first : asked.first + len(asked.keys)]
            asked.job.fail(blocks, _refusal(header.reason))
            self._answered(asked)

    def _loaded(self, header: TransferHeader, values: Sequence[Frame]) -> None:
        asked = self._asked.pop(header.transfer_id, None)
        if asked is None:
            return  # timed out, or of a session that is over
        block_ids = asked.job.block_ids[asked.first : asked.first + len(asked.keys)]
        if header.keys != asked.keys:
            asked.job.fail(block_ids, "damaged")
        else:
            for block_id, key, value in zip(block_ids, asked.keys, values, strict=True):
                reason = self._fill(asked.job, block_id, key.block_hash, value)
                if reason:
                    asked.job.fail([block_id], reason)
        self._answered(asked)

    def _fill(self, job: _Load, block_id: int, block_hash: BlockHash, value: Frame) -> str:
        """Checks a value and writes it into its block; the reason when that was not possible."""
        if not len(value):
            return "missing"
        try:
            payload = decode_block(
                value, block_hash=block_hash, num_tokens=self._kv.block_size, fingerprint=self._fingerprint
            )
        except BadBlock as error:
            return error.reason
        if payload.nbytes != self._kv.block_nbytes:
            return "foreign"
        with self._lock:
            if job.session != self._session:
                return "stale"
            self._kv.import_block(block_id, payload)
        self._metrics.loads.inc()
        self._metrics.load_bytes.inc(len(value))
        return ""

    def _answered(self, asked: _AskedBlocks) -> None:
        asked.job.num_outstanding -= len(asked.keys)
        if asked.job.ended:
            self._end(asked.job)

    def _end(self, job: _Load) -> None:
        self._jobs.remove(job)
        with self._lock:
            if job.session != self._session:
                return
            self._num_pending_loads -= 1
            self._metrics.loads_pending.set(self._num_pending_loads)
        self._send_report(job)

    def _send_report(self, job: _Load) -> None:
        self._metrics.load_seconds.observe(self._clock() - job.started_s)
        if job.failed:
            self._metrics.loads_failed.labels(job.reason).inc(len(job.failed))
        failed = pack_ids(job.failed)
        self._report(job.session, (LoadReport(job.load.handle, job.load.group_id, failed, job.reason),))


class NoStore:
    """Stands in for `Transfers` where no store is configured: saves are dropped, loads fail."""

    def __init__(
        self, metrics: WorkerMetrics, report: Callable[[bytes, tuple[LoadReport, ...]], None]
    ) -> None:
        self._metrics = metrics
        self._report = report
        self._session = b""

    def begin_session(self, session: bytes) -> None:
        self._session = session

    def save(self, saves: Sequence[BlockSave]) -> int:
        self._metrics.saves_dropped.labels("no_store").inc(len(saves))
        return len(saves)

    def load(self, loads: Sequence[BlockLoad]) -> None:
        for load in loads:
            self._metrics.loads_failed.labels("unavailable").inc(len(load.block_hashes))
            failed = LoadReport(load.handle, load.group_id, load.block_ids, "unavailable")
            self._report(self._session, (failed,))


def _same_generation(staged: deque[_StagedSave], limit: int) -> list[_StagedSave]:
    """The first staged saves, as many as share the first one's generation, at most `limit`."""
    taken: list[_StagedSave] = []
    for item in staged:
        if len(taken) >= limit or item.save.generation != staged[0].save.generation:
            break
        taken.append(item)
    return taken


def _refusal(reason: str) -> str:
    return "unavailable" if reason == "unavailable" else "refused"
