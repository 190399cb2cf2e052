"""Blocks on their way from the store into the cache.

What the index of the store's shared memory names, the link's thread copies; it asks for the rest.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from reprise_core.steps import BlockLoad, LoadReport, TransferMeasure, TransferReport, pack_ids, unpack_ids
from reprise_wire.block_codec import BlockFormat
from reprise_wire.block_transfer import BlockKey, Place, TransferHeader, TransferKind, encode_transfer
from reprise_wire.host_index import IndexEntry
from reprise_worker.block_fills import BlockFills, Target
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
    numbers: Sequence[int]

    @property
    def block_ids(self) -> list[int]:
        return [self.job.block_ids[number] for number in self.numbers]


def _target(job: _Load, number: int, place: Place) -> Target:
    return Target(place.offset, place.nbytes, job.block_ids[number], job.load.block_hashes[number])


class BlockLoads:
    """`begin_session` and `start` belong to the step thread, the rest to the link's. The lock of the fills
    guards what both touch. Every load ends in exactly one report, unless its session ends first."""

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
        self._wire = wire
        self._max_pending = max_pending
        self._max_blocks_in_flight = max(1, max_bytes_in_flight // kv.block_nbytes)
        self._max_blocks_at_once = min(MAX_READ_AT_ONCE, max(1, READ_AT_ONCE_BYTES // kv.block_nbytes))
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._report = report
        self._clock = clock
        self._fills = BlockFills(kv, formats, fp8)
        self._new: deque[_Load] = deque()
        self._num_pending = 0
        self._jobs: list[_Load] = []  # loads that have not ended
        self._asked: dict[int, _AskedBlocks] = {}
        self._to_release: deque[int] = deque(maxlen=MAX_RELEASES_WAITING)
        self._to_tell: deque[TransferHeader] = deque(maxlen=MAX_READS_WAITING)

    @property
    def session(self) -> bytes:
        return self._fills.session

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
        with self._fills.lock:
            self._fills.session = session
            self._new.clear()
            self._num_pending = 0
            self._metrics.loads_pending.set(0)

    def start(self, loads: Sequence[BlockLoad]) -> None:
        now_s = self._clock()
        refused: list[_Load] = []
        with self._fills.lock:
            for load in loads:
                job = _Load(self.session, load, unpack_ids(load.block_ids), now_s)
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
        if len(places) != len(asked.numbers):
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
        with self._fills.lock:
            session = self.session
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
            job.num_outstanding -= len(asked.numbers)
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
        targets = [_target(job, number, entry.place) for number, entry in chunk]
        read: list[int] = []
        num_bytes = 0
        for (number, entry), target, wrong in zip(chunk, targets, self._fill(job, targets), strict=True):
            if wrong or not self._index_holds(entry):
                job.to_ask.append(number)
            else:
                read.append(number)
                num_bytes += target.nbytes
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

    def _index_holds(self, entry: IndexEntry) -> bool:
        """A checksum does not tell whose group's or rank's block was copied."""
        return self._wire.index is not None and self._wire.index.holds(entry)

    def _ask(self, send: Send) -> None:
        while self._ask_blocks(send):
            pass

    def _ask_blocks(self, send: Send) -> bool:
        """Sends one LOAD message; False when there is nothing to ask or no way to."""
        in_flight = sum(len(asked.numbers) for asked in self._asked.values())
        room = min(self._wire.blocks_per_message, self._max_blocks_in_flight - in_flight)
        job = next((job for job in self._jobs if job.to_ask), None)
        if job is None or room <= 0:
            return False
        load, numbers = job.load, list(islice(job.to_ask, room))
        keys = self._keys(load, numbers)
        header = self._wire.header(TransferKind.LOAD, keys, load.generation, adapter_id=load.adapter_id)
        if not send([encode_transfer(header)]):
            return False
        self._asked[header.transfer_id] = _AskedBlocks(job, numbers)
        for _ in numbers:
            job.to_ask.popleft()
        job.num_outstanding += len(numbers)
        return True

    def _fill_all(self, asked: _AskedBlocks, places: Sequence[Place], frames: Sequence[Frame]) -> None:
        job, num_filled, num_bytes = asked.job, 0, 0
        targets = [_target(job, number, place) for number, place in zip(asked.numbers, places, strict=True)]
        for target, wrong in zip(targets, self._fill(job, targets, frames), strict=True):
            if wrong:
                job.fail([target.block_id], wrong)
            else:
                num_filled += 1
                num_bytes += target.nbytes
        self._count(job, num_filled, num_bytes)

    def _fill(self, job: _Load, targets: Sequence[Target], frames: Sequence[Frame] = ()) -> list[str]:
        return self._fills.fill(
            job.session, targets, adapter_id=job.load.adapter_id, memory=self._wire.memory, frames=frames
        )

    def _count(self, job: _Load, num_filled: int, num_bytes: int) -> None:
        job.num_bytes += num_bytes
        self._metrics.loads.inc(num_filled)
        self._metrics.load_bytes.inc(num_bytes)

    def _answered(self, asked: _AskedBlocks) -> None:
        asked.job.num_outstanding -= len(asked.numbers)
        if asked.job.ended:
            self._end(asked.job)

    def _end(self, job: _Load) -> None:
        self._jobs.remove(job)
        with self._fills.lock:
            if job.session != self.session:
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
