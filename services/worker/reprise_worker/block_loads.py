"""Blocks on their way from the store into the cache.

What the index of the store's shared memory names, the link's thread copies; it asks for the rest. A value in
shared memory is copied first and checked after, because its place may be given to another value at any time;
so a block that failed may hold anything, and its report says so. A value in a message is checked first.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from reprise_core.ids import BlockHash
from reprise_core.steps import BlockLoad, LoadReport, TransferMeasure, TransferReport, pack_ids, unpack_ids
from reprise_runtime.shared_memory import Memory, read_into
from reprise_wire.block_codec import (
    HEADER_NBYTES,
    BadBlock,
    BlockFormat,
    check_header,
    check_payload,
    decode_block,
)
from reprise_wire.block_transfer import BlockKey, Place, TransferHeader, TransferKind, encode_transfer
from reprise_wire.host_index import IndexEntry
from reprise_worker.fp8_values import Fp8Values
from reprise_worker.kv_cache import KvCache
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.store_wire import Frame, Send, StoreWire, refusal

RELEASE_AT_ONCE = 4
"""Answers that were read are released together, while others are still to come."""
MAX_RELEASES_WAITING = 4096
"""Releases that found no way to the store; past it the oldest is left to the lease's own end."""
READ_AT_ONCE_BYTES, MAX_READ_AT_ONCE = 16 * 1024 * 1024, 256
"""What is copied without asking before answers have their turn (some 2 ms), and its number of blocks."""
MAX_READS_WAITING = 64
"""Messages about what was read without asking; past it the oldest is forgotten."""


@dataclass(slots=True)
class _Load:
    """Invariant: each of its blocks is to be read, to be asked for, asked for, filled or failed."""

    session: bytes
    load: BlockLoad
    block_ids: list[int]
    started_s: float
    to_read: deque[tuple[int, IndexEntry]] = field(default_factory=deque)
    to_ask: deque[int] = field(default_factory=deque)
    """Numbers of the load's blocks, as in `to_read`."""
    num_outstanding: int = 0
    failed: list[int] = field(default_factory=list)
    reason: str = ""
    num_bytes: int = 0

    def fail(self, block_ids: Sequence[int], reason: str) -> None:
        self.failed += block_ids
        self.reason = self.reason or reason

    @property
    def ended(self) -> bool:
        return not (self.to_read or self.to_ask or self.num_outstanding)


@dataclass(slots=True)
class _AskedBlocks:
    """One LOAD message on its way."""

    job: _Load
    block_ids: list[int]
    keys: tuple[BlockKey, ...]


class BlockLoads:
    """`begin_session` and `start` belong to the step thread, the rest to the link's. The lock guards what
    both touch, and is held while a block is written, so that nothing of a session is written after it has
    ended. Every load ends in exactly one report, unless its session ends first."""

    def __init__(
        self,
        kv: KvCache,
        wire: StoreWire,
        *,
        formats: Sequence[BlockFormat],
        fp8: Fp8Values | None,
        max_pending: int,
        max_bytes_in_flight: int,
        timeout_s: float,
        metrics: WorkerMetrics,
        report: Callable[[bytes, TransferReport], None],
        clock: Callable[[], float],
    ) -> None:
        """`formats`: of values, by adapter id."""
        self._kv = kv
        self._wire = wire
        self._max_pending = max_pending
        self._max_blocks_in_flight = max(1, max_bytes_in_flight // kv.block_nbytes)
        self._max_blocks_at_once = min(MAX_READ_AT_ONCE, max(1, READ_AT_ONCE_BYTES // kv.block_nbytes))
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._report = report
        self._clock = clock
        self._formats = formats
        self._fp8 = fp8
        self._lock = threading.Lock()
        self._session = b""
        self._new: deque[_Load] = deque()
        self._num_pending = 0
        self._jobs: list[_Load] = []  # loads that have not ended
        self._asked: dict[int, _AskedBlocks] = {}
        self._to_release: deque[int] = deque(maxlen=MAX_RELEASES_WAITING)
        self._to_tell: deque[TransferHeader] = deque(maxlen=MAX_READS_WAITING)

    @property
    def session(self) -> bytes:
        return self._session

    @property
    def has_unasked(self) -> bool:
        return any(job.to_ask for job in self._jobs)

    @property
    def has_unread(self) -> bool:
        return any(job.to_read for job in self._jobs)

    @property
    def deadlines_s(self) -> list[float]:
        return [job.started_s + self._timeout_s for job in self._jobs]

    def begin_session(self, session: bytes) -> None:
        """Drops the loads of an earlier session."""
        with self._lock:
            self._session = session
            self._new.clear()
            self._num_pending = 0
            self._metrics.loads_pending.set(0)

    def start(self, loads: Sequence[BlockLoad]) -> None:
        now_s = self._clock()
        refused: list[_Load] = []
        with self._lock:
            for load in loads:
                job = _Load(self._session, load, unpack_ids(load.block_ids), now_s)
                if self._num_pending >= self._max_pending:
                    job.fail(job.block_ids, "unavailable")
                    refused.append(job)
                    continue
                self._num_pending += 1
                self._new.append(job)
            self._metrics.loads_pending.set(self._num_pending)
        for job in refused:
            self._send_report(job)

    def pump(self, send: Send, now_s: float) -> None:
        """Ends what has timed out, asks for what the limits allow, copies some of what needs no asking, and
        releases what was read."""
        self._take_new()
        for job in [job for job in self._jobs if now_s >= job.started_s + self._timeout_s]:
            self._give_up(job, "timeout")
        self._ask(send)
        if self._read_found():
            self._ask(send)
        self._tell(send)
        enough = not self._asked or len(self._to_release) >= RELEASE_AT_ONCE
        if self._to_release and enough and self._wire.memory is not None:
            header = self._wire.header(TransferKind.RELEASE, released=tuple(self._to_release))
            if send([encode_transfer(header)]):
                self._to_release.clear()

    def loaded(self, header: TransferHeader, frames: Sequence[Frame]) -> None:
        if any(place.nbytes and place.offset >= 0 for place in header.places):
            self._to_release.append(header.transfer_id)
        asked = self._asked.pop(header.transfer_id, None)
        if asked is None:
            return  # timed out, or of a session that is over
        places = header.places or [Place(-1, len(frame)) for frame in frames]
        if len(places) != len(asked.keys):
            asked.job.fail(asked.block_ids, "damaged")
        else:
            self._fill_all(asked, places, frames)
        self._answered(asked)

    def refused(self, header: TransferHeader) -> None:
        asked = self._asked.pop(header.transfer_id, None)
        if asked is not None:
            asked.job.fail(asked.block_ids, refusal(header.reason))
            self._answered(asked)

    def store_left(self) -> None:
        """The connection broke: no answer will come to what was asked, and memory and leases are gone."""
        self._to_release.clear()
        for job in self._jobs:
            job.to_ask += [number for number, _ in job.to_read]
            job.to_read.clear()
        for asked in list(self._asked.values()):
            asked.job.fail(asked.block_ids, "unavailable")
            self._answered(asked)
        self._asked.clear()

    def fail_all(self, reason: str, *, older_than_s: float = 0.0) -> None:
        self._take_new()
        now_s = self._clock()
        for job in [job for job in self._jobs if now_s - job.started_s >= older_than_s]:
            self._give_up(job, reason)

    def _take_new(self) -> None:
        with self._lock:
            session = self._session
            new = list(self._new)
            self._new.clear()
        for job in new:
            self._look_up(job)
        self._jobs += new
        # Loads of an ended session: no report, and late values find no job.
        self._jobs = [job for job in self._jobs if job.session == session]
        self._asked = {key: asked for key, asked in self._asked.items() if asked.job.session == session}

    def _give_up(self, job: _Load, reason: str) -> None:
        for transfer_id in [key for key, asked in self._asked.items() if asked.job is job]:
            asked = self._asked.pop(transfer_id)
            job.num_outstanding -= len(asked.keys)
            job.fail(asked.block_ids, reason)
        left = [*(number for number, _ in job.to_read), *job.to_ask]
        job.fail([job.block_ids[number] for number in left], "unavailable" if reason == "timeout" else reason)
        job.to_read.clear()
        job.to_ask.clear()
        self._end(job)

    def _look_up(self, job: _Load) -> None:
        index, load = self._wire.index, job.load
        if index is None:
            job.to_ask += range(len(job.block_ids))
            return
        keys = self._keys(load, range(len(load.block_hashes)))
        names = self._wire.names(keys, load.generation, adapter_id=load.adapter_id)
        for number, entry in enumerate(index.find(names)):
            if entry is None:
                job.to_ask.append(number)
            else:
                job.to_read.append((number, entry))

    def _keys(self, load: BlockLoad, numbers: Iterable[int]) -> tuple[BlockKey, ...]:
        return tuple(self._wire.key(load.group_id, load.block_hashes[number]) for number in numbers)

    def _read_found(self) -> bool:
        """Copies some of one load's blocks; False when there is nothing to copy."""
        job = next((job for job in self._jobs if job.to_read), None)
        if job is None:
            return False
        at_once = min(self._max_blocks_at_once, len(job.to_read))
        chunk = [job.to_read.popleft() for _ in range(at_once)]
        read: list[int] = []
        num_bytes = 0
        for number, entry in chunk:
            place = entry.place
            if self._read(job, number, place) and self._index_holds(entry):
                read.append(number)
                num_bytes += place.nbytes
            else:
                job.to_ask.append(number)
        self._count(job, len(read), num_bytes)
        self._metrics.loads_by_index.inc(len(read))
        if job.ended:
            self._end(job)
        if read:
            load = job.load
            self._to_tell.append(
                self._wire.header(
                    TransferKind.READ, self._keys(load, read), load.generation, adapter_id=load.adapter_id
                )
            )
        return True

    def _tell(self, send: Send) -> None:
        """What was read, once there is no more to read: the store's work is to delay no load. A hint: what
        finds no way is forgotten."""
        if not self.has_unread:
            for header in self._to_tell:
                send([encode_transfer(header)])
            self._to_tell.clear()

    def _read(self, job: _Load, number: int, place: Place) -> bool:
        """Whether the block holds what it should; else the store has to say."""
        try:
            self._fill(job, job.block_ids[number], job.load.block_hashes[number], place, None)
        except BadBlock:
            return False
        return True

    def _index_holds(self, entry: IndexEntry) -> bool:
        """A checksum does not tell whose group's or rank's block was copied."""
        return self._wire.index is not None and self._wire.index.holds(entry)

    def _ask(self, send: Send) -> None:
        while self._ask_blocks(send):
            pass

    def _ask_blocks(self, send: Send) -> bool:
        """Sends one LOAD message; False when there is nothing to ask or no way to."""
        in_flight = sum(len(asked.keys) for asked in self._asked.values())
        room = min(self._wire.blocks_per_message, self._max_blocks_in_flight - in_flight)
        job = next((job for job in self._jobs if job.to_ask), None)
        if job is None or room <= 0:
            return False
        load, numbers = job.load, list(islice(job.to_ask, room))
        keys = self._keys(load, numbers)
        header = self._wire.header(TransferKind.LOAD, keys, load.generation, adapter_id=load.adapter_id)
        if not send([encode_transfer(header)]):
            return False
        block_ids = [job.block_ids[number] for number in numbers]
        self._asked[header.transfer_id] = _AskedBlocks(job, block_ids, keys)
        for _ in numbers:
            job.to_ask.popleft()
        job.num_outstanding += len(keys)
        return True

    def _fill_all(self, asked: _AskedBlocks, places: Sequence[Place], frames: Sequence[Frame]) -> None:
        rest, job = iter(frames), asked.job
        num_filled, num_bytes = 0, 0
        for block_id, key, place in zip(asked.block_ids, asked.keys, places, strict=True):
            frame = next(rest) if place.offset < 0 else None
            try:
                self._fill(job, block_id, key.block_hash, place, frame)
            except BadBlock as error:
                job.fail([block_id], error.reason)
            else:
                num_filled += 1
                num_bytes += place.nbytes
        self._count(job, num_filled, num_bytes)

    def _count(self, job: _Load, num_filled: int, num_bytes: int) -> None:
        job.num_bytes += num_bytes
        self._metrics.loads.inc(num_filled)
        self._metrics.load_bytes.inc(num_bytes)

    def _fill(
        self, job: _Load, block_id: int, block_hash: BlockHash, place: Place, frame: Frame | None
    ) -> None:
        """Raises BadBlock unless the block then holds what the hash stands for."""
        if not place.nbytes:
            raise BadBlock("missing", "no tier of the store has it")
        if frame is not None:
            payload = decode_block(frame, block_hash=block_hash, format=self._formats[job.load.adapter_id])
            self._write(job, block_id, payload)
            return
        if self._wire.memory is None:
            raise BadBlock("damaged", "a place in memory that is not shared")
        try:
            self._fill_from(self._wire.memory, job, block_id, block_hash, place)
        except OSError as error:
            raise BadBlock("damaged", f"shared memory: {error}") from error

    def _fill_from(
        self, memory: Memory, job: _Load, block_id: int, block_hash: BlockHash, place: Place
    ) -> None:
        format = self._formats[job.load.adapter_id]
        header = bytes(memory.view(place.offset, HEADER_NBYTES))
        check_header(header, format=format, value_nbytes=place.nbytes)
        block = self._kv.block_memory(block_id) if self._fp8 is None else None
        if block is None:
            payload = memoryview(bytearray(format.payload_nbytes))
            read_into(memory, place.offset + HEADER_NBYTES, payload)
            check_payload(header, payload, block_hash=block_hash)
            self._write(job, block_id, payload)
            return
        with self._lock:
            self._check_session(job)
            address = self._kv.block_address(block_id)
            memory.copy_to(address, place.offset + HEADER_NBYTES, format.payload_nbytes)
        check_payload(header, block, block_hash=block_hash)

    def _write(self, job: _Load, block_id: int, payload: memoryview) -> None:
        """A payload that was checked."""
        data = payload if self._fp8 is None else self._fp8.decode(payload)
        with self._lock:
            self._check_session(job)
            self._kv.import_block(block_id, data)

    def _check_session(self, job: _Load) -> None:
        """The caller holds the lock and is about to write."""
        if job.session != self._session:
            raise BadBlock("stale", "its session is over")

    def _answered(self, asked: _AskedBlocks) -> None:
        asked.job.num_outstanding -= len(asked.keys)
        if asked.job.ended:
            self._end(asked.job)

    def _end(self, job: _Load) -> None:
        self._jobs.remove(job)
        with self._lock:
            if job.session != self._session:
                return
            self._num_pending -= 1
            self._metrics.loads_pending.set(self._num_pending)
        self._send_report(job)

    def _send_report(self, job: _Load) -> None:
        seconds = self._clock() - job.started_s
        self._metrics.load_seconds.observe(seconds)
        if job.failed:
            self._metrics.loads_failed.labels(job.reason).inc(len(job.failed))
        report = LoadReport(job.load.handle, job.load.group_id, pack_ids(job.failed), job.reason)
        measure = TransferMeasure(len(job.block_ids), job.num_bytes, seconds)
        self._report(job.session, TransferReport((report,), (measure,)))
