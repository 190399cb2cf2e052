"""Blocks to and from the store, beside the steps.

`save`, `load` and `begin_session` belong to the step thread; all else to the link's thread.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reprise_core.errors import DataLoss
from reprise_core.steps import BlockLoad, BlockSave, LoadReport, TransferMeasure, TransferReport
from reprise_runtime.shared_memory import Memory
from reprise_wire.block_transfer import Keyspace, TransferHeader, TransferKind
from reprise_wire.host_index import HostIndex
from reprise_worker.block_loads import BlockLoads
from reprise_worker.block_saves import BlockSaves
from reprise_worker.fp8_values import Fp8Values
from reprise_worker.kv_cache import KvCache
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.staging import Staging
from reprise_worker.store_wire import Frame, Send, StoreWire


@dataclass(frozen=True, slots=True)
class TransferLimits:
    staging_bytes: int
    max_saves_in_flight: int
    max_pending_loads: int
    max_load_bytes_in_flight: int
    load_timeout_s: float
    save_timeout_s: float


class Transfers:
    def __init__(
        self,
        kv: KvCache,
        *,
        keyspace: Keyspace,
        rank: int,
        adapters: Sequence[str] = (),
        limits: TransferLimits,
        metrics: WorkerMetrics,
        report: Callable[[bytes, TransferReport], None],
        shared_memory: bool = True,
        fp8: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`adapters`: content digests, in the order of their ids."""
        self._metrics = metrics
        self._report = report
        self._wake: Callable[[], None] = lambda: None
        self._clock = clock
        self._wire = StoreWire(keyspace, rank, kv.block_nbytes, adapters=adapters)
        fp8_values = Fp8Values(kv) if fp8 else None
        formats = [kv.block_format(fingerprint) for fingerprint in self._wire.fingerprints]
        if fp8_values is not None:
            formats = [fp8_values.format(format) for format in formats]
        self._staging = Staging(
            kv.block_nbytes,
            staging_bytes=limits.staging_bytes,
            pinned=kv.keys[0].is_cuda,
            shared=shared_memory,
        )
        self._saves = BlockSaves(
            kv,
            self._wire,
            self._staging,
            formats=formats,
            fp8=fp8_values,
            max_in_flight=limits.max_saves_in_flight,
            timeout_s=limits.save_timeout_s,
            metrics=metrics,
            report=self._report_save,
            clock=clock,
        )
        self._loads = BlockLoads(
            kv,
            self._wire,
            formats=formats,
            fp8=fp8_values,
            max_pending=limits.max_pending_loads,
            max_bytes_in_flight=limits.max_load_bytes_in_flight,
            timeout_s=limits.load_timeout_s,
            metrics=metrics,
            report=report,
            clock=clock,
        )

    def _report_save(self, measure: TransferMeasure) -> None:
        self._report(self._loads.session, TransferReport(saved=(measure,)))

    def wake_with(self, wake: Callable[[], None]) -> None:
        """How the link is told that there is something to send."""
        self._wake = wake

    # The step thread's side.

    def begin_session(self, session: bytes) -> None:
        """Drops the loads of an earlier session; staged saves stay, their content is right anyway."""
        self._loads.begin_session(session)

    def save(self, saves: Sequence[BlockSave]) -> int:
        """Copies blocks into staging before it returns; answers how many found no room."""
        num_dropped = self._saves.stage(saves)
        self._wake()
        return num_dropped

    def load(self, loads: Sequence[BlockLoad]) -> None:
        self._loads.start(loads)
        self._wake()

    # The link thread's side.

    @property
    def staging_memory(self) -> Memory | None:
        """What a store of this machine may read of ours."""
        return self._staging.memory

    def hello(self) -> TransferHeader:
        return self._wire.header(TransferKind.HELLO)

    def store_arrived(self, memory: Memory | None = None, index: HostIndex | None = None) -> None:
        """It said WELCOME; `memory` is its own, with the host tier's `index`, where the two share any."""
        self._wire.memory, self._wire.index = memory, index
        self._metrics.store_memory_shared.set(memory is not None)

    def store_left(self) -> None:
        """The connection broke. What waits goes to whoever comes next."""
        self.store_arrived()
        self._saves.store_left()
        self._loads.store_left()

    def fail_loads(self, *, older_than_s: float) -> None:
        """The store is away: computing is faster than waiting long for it. Saves wait in staging."""
        self._loads.fail_all("unavailable", older_than_s=older_than_s)

    def refuse_all(self) -> None:
        """The store will have nothing of us: nobody is to wait for it."""
        self._saves.drop_staged("refused")
        self._loads.fail_all("refused")

    def pump(self, send: Send) -> None:
        """Sends what the limits allow, and ends what has timed out."""
        now_s = self._clock()
        self._loads.pump(send, now_s)
        self._saves.pump(send, now_s)

    @property
    def has_unread(self) -> bool:
        """Whether `pump` has more to copy out of the store's memory: what came meanwhile goes first."""
        return self._loads.has_unread

    def next_deadline_s(self) -> float | None:
        """On the clock's scale; None when nothing is in flight."""
        return min([*self._loads.deadlines_s, *self._saves.deadlines_s], default=None)

    @property
    def has_unsent(self) -> bool:
        """Whether `pump` left something unsent that an answer will not bring along: the peer is away."""
        return self._saves.num_staged > 0 or self._loads.has_unasked

    def receive(self, header: TransferHeader, frames: Sequence[Frame]) -> None:
        """Raises DataLoss for what a store does not send."""
        if header.kind == TransferKind.SAVED:
            self._saves.saved(header)
        elif header.kind == TransferKind.LOADED:
            self._loads.loaded(header, frames)
        elif header.kind == TransferKind.REFUSED:
            self._saves.refused(header)
            self._loads.refused(header)
        else:
            raise DataLoss(f"transfer: a store does not send {header.kind[:20]!r}")


class NoStore:
    """Stands in for `Transfers` where no store is configured: saves are dropped, loads fail."""

    def __init__(self, metrics: WorkerMetrics, report: Callable[[bytes, TransferReport], None]) -> None:
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
            self._report(self._session, TransferReport((failed,)))
