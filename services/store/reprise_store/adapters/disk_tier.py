"""The optional tier on local disk, between host memory and Redis: one file per block.

    FOLDER/lock                                     one store at a time
    FOLDER/ns-NAMESPACE/FINGERPRINT/generation      used where no Redis keeps it
    FOLDER/ns-NAMESPACE/FINGERPRINT/GENERATION/REST one block; REST is the rest of its key, dots for colons

Least recently used blocks leave first. The index is in memory and changes on the event loop; files are
read and written in threads. A file is written beside its place and renamed, so no reader sees half of
one. Nothing is synced: what a power failure leaves behind is a file that the worker's checksum refuses.
"""

import asyncio
import fcntl
import os
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from reprise_core.errors import FailedPrecondition
from reprise_runtime.logs import LimitedLog, get_logger
from reprise_store.keys import Scope
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import Value
from reprise_store.tier_changes import TierChanges
from reprise_wire.store_codec import StoreTier

BATCH_BLOCKS = 32
"""Files written by one turn of a thread."""
PAUSE_AFTER_ERROR_S = 5.0
"""How long a disk that refused a file is left alone; what comes meanwhile is dropped and counted."""
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class _File:
    scope: Scope
    nbytes: int


class DiskTier:
    """Invariants: num_bytes is the sum of the indexed files' sizes and at most `capacity_bytes`; the queue
    holds at most `queue_bytes`.

    A name is indexed only when its file is whole. `open` comes first, `close` last.
    """

    def __init__(
        self,
        folder: Path,
        *,
        capacity_bytes: int,
        queue_bytes: int,
        metrics: StoreMetrics,
        changes: TierChanges | None = None,
    ) -> None:
        """`changes` hears of every block that comes and goes."""
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._folder = folder
        self._queue_limit_bytes = queue_bytes
        self._metrics = metrics
        self._changes = changes
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._queue: deque[tuple[Scope, str, Value]] = deque()
        self._queue_bytes = 0
        self._doomed: list[Path] = []
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._resume_s = 0.0
        self._lock_file: int | None = None
        self._log = get_logger()
        self._limited = LimitedLog()
        metrics.disk_capacity_bytes.set(capacity_bytes)

    # -- life -------------------------------------------------------------------------------------

    def open(self) -> None:
        """Takes the folder and indexes what is there, oldest first. Raises FailedPrecondition when it
        cannot be used or another store has it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FailedPrecondition(
                f"disk_folder {str(self._folder)!r} is in use by another store"
            ) from error
        except OSError as error:
            raise FailedPrecondition(
                f"disk_folder {str(self._folder)!r} cannot be used: {error.strerror}"
            ) from error
        found = sorted(self._scan(), key=lambda entry: entry[0])
        for _, name, file in found:
            self._index(name, file)
        self._make_room(0)
        self._unlink(self._take_doomed())

    async def drain(self, timeout_s: float) -> None:
        """Waits until all is written or the time is up; what is left is counted as dropped."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            self._drop("unavailable", len(self._queue))

    def close(self) -> None:
        """After `write_forever` has ended."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    # -- blocks -------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return len(self._files)

    def has(self, name: str) -> bool:
        return name in self._files

    def offer(self, scope: Scope, name: str, value: Value) -> bool:
        """Queues the value, which stays as it is; never waits. False: dropped and counted. A block that is
        there already is written again: a save may mend a damaged one."""
        nbytes = len(value)
        if self._queue_bytes + nbytes > self._queue_limit_bytes or nbytes > self.capacity_bytes:
            self._drop("queue_full", 1)
            return False
        self._queue.append((scope, name, value))
        self._queue_bytes += nbytes
        self._metrics.disk_queue_bytes.set(self._queue_bytes)
        self._idle.clear()
        self._arrived.set()
        return True

    async def read(self, names: Sequence[str]) -> list[Value | None]:
        """Values in the names' order; None where there is none, or its file could not be read."""
        wanted = [
            (index, name, self._files[name].scope) for index, name in enumerate(names) if self.has(name)
        ]
        values: list[Value | None] = [None] * len(names)
        if not wanted:
            return values
        read = await asyncio.to_thread(
            lambda: [self._read_file(self._path(scope, name)) for _, name, scope in wanted]
        )
        for (index, name, _), value in zip(wanted, read, strict=True):
            values[index] = value
            if value is None:
                self._metrics.disk_read_failures.inc()
                self.drop(name)
            elif name in self._files:
                self._files.move_to_end(name)
        return values

    def drop(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is not None:
            self.num_bytes -= file.nbytes
            self._doomed.append(self._path(file.scope, name))
            self._arrived.set()
            self._show()
            if self._changes is not None:
                self._changes.removed(StoreTier.DISK, name)

    def at_generation(self, scope: Scope, generation: int) -> None:
        """Forgets the scope's blocks of other generations; their files go in the background."""
        keep = f"{scope.namespace}:{generation}:"
        for name in self.names(scope):
            if not name.startswith(keep):
                self.drop(name)
            elif self._changes is not None:
                self._changes.stored(StoreTier.DISK, name)  # of an earlier process: told for the first time
        kept = deque(item for item in self._queue if item[0] != scope or item[1].startswith(keep))
        self._drop("stale", len(self._queue) - len(kept))
        self._queue = kept
        self._queue_bytes = sum(len(value) for _, _, value in kept)

    def names(self, scope: Scope) -> list[str]:
        return [name for name, file in self._files.items() if file.scope == scope]

    async def write_forever(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._queue or self._doomed:
                await self._write_some()
            self._idle.set()

    # -- generations, where no Redis keeps them -------------------------------------------------------

    async def ensure_generation(self, scope: Scope, proposal: int) -> int:
        """The scope's generation, `proposal` when there is none; it outlives this process."""
        return await asyncio.to_thread(self._read_generation, scope) or await self._write_generation(
            scope, proposal
        )

    async def advance_generation(self, scope: Scope, proposal: int) -> int:
        before = await asyncio.to_thread(self._read_generation, scope) or proposal
        return await self._write_generation(scope, before + 1)

    def _read_generation(self, scope: Scope) -> int | None:
        try:
            return int((self._scope_folder(scope) / "generation").read_text())
        except (OSError, ValueError):
            return None

    async def _write_generation(self, scope: Scope, generation: int) -> int:
        await asyncio.to_thread(
            _write_whole, self._scope_folder(scope) / "generation", str(generation).encode()
        )
        return generation

    # -- files ----------------------------------------------------------------------------------------

    async def _write_some(self) -> None:
        """One batch: old files go first, so that the folder never holds much more than its capacity."""
        batch = [self._queue.popleft() for _ in range(min(BATCH_BLOCKS, len(self._queue)))]
        self._queue_bytes -= sum(len(value) for _, _, value in batch)
        self._metrics.disk_queue_bytes.set(self._queue_bytes)
        if monotonic() < self._resume_s:
            self._drop("unavailable", len(batch))
            batch = []
        self._make_room(sum(len(value) for _, _, value in batch))
        doomed = self._take_doomed()
        error = await asyncio.to_thread(self._write_files, doomed, batch)
        written = batch
        if error is not None:
            written = []
            self._drop("io_error", len(batch))
            self._resume_s = monotonic() + PAUSE_AFTER_ERROR_S
            self._limited.warning(self._log, "disk tier cannot write", error=error)
        for scope, name, value in written:
            self._index(name, _File(scope, len(value)))
            self._metrics.saves.labels("disk", "written").inc()
            self._metrics.save_bytes.labels("disk").inc(len(value))
            if self._changes is not None:
                self._changes.stored(StoreTier.DISK, name)

    def _write_files(self, doomed: Sequence[Path], batch: Sequence[tuple[Scope, str, Value]]) -> str | None:
        """In a thread. The system's words for what went wrong, if it did."""
        self._unlink(doomed)
        try:
            for scope, name, value in batch:
                _write_whole(self._path(scope, name), value)
        except OSError as error:
            return error.strerror or type(error).__name__
        return None

    def _index(self, name: str, file: _File) -> None:
        before = self._files.pop(name, None)
        self.num_bytes += file.nbytes - (before.nbytes if before else 0)
        self._files[name] = file
        self._show()

    def _make_room(self, nbytes: int) -> None:
        while self._files and self.num_bytes + nbytes > self.capacity_bytes:
            self.drop(next(iter(self._files)))
            self._metrics.disk_evictions.inc()

    def _take_doomed(self) -> list[Path]:
        doomed, self._doomed = self._doomed, []
        return doomed

    def _unlink(self, paths: Sequence[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)

    def _drop(self, reason: str, num_blocks: int) -> None:
        self._metrics.disk_dropped.labels(reason).inc(num_blocks)
        self._metrics.saves.labels("disk", "dropped").inc(num_blocks)

    def _show(self) -> None:
        self._metrics.disk_bytes.set(self.num_bytes)
        self._metrics.disk_blocks.set(len(self._files))

    def _scope_folder(self, scope: Scope) -> Path:
        # The mark before the namespace keeps "." and ".." from meaning something to the file system.
        return self._folder / f"ns-{scope.namespace}" / scope.fingerprint

    def _path(self, scope: Scope, name: str) -> Path:
        _, generation, _, rest = name.split(":", 3)
        return self._scope_folder(scope) / generation / rest.replace(":", ".")

    def _scan(self) -> Iterator[tuple[float, str, _File]]:
        """Age, name and file of every whole block; anything half written is removed."""
        for scope_folder in self._folder.glob("ns-*/*"):
            scope = Scope(scope_folder.parent.name.removeprefix("ns-"), scope_folder.name)
            for path in scope_folder.glob("*/*"):
                status = path.stat()
                if path.suffix == _PARTIAL or not status.st_size:
                    path.unlink(missing_ok=True)
                    continue
                rest = path.name.replace(".", ":")
                name = f"{scope.namespace}:{path.parent.name}:{scope.fingerprint}:{rest}"
                yield status.st_mtime, name, _File(scope, status.st_size)

    @staticmethod
    def _read_file(path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except OSError:
            return None


def _write_whole(path: Path, value: Value) -> None:
    partial = path.with_name(path.name + _PARTIAL)
    try:
        try:
            partial.write_bytes(value)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(value)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
