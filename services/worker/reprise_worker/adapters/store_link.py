"""Transfers over ZMQ: the thread that carries block values between staging, cache and store."""

import time
from collections.abc import Callable

import zmq

from reprise_core.errors import DataLoss
from reprise_runtime.logs import LimitedLog, get_logger
from reprise_worker.adapters.dealer import DealerThread
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.transfer import Transfers

log = get_logger()

# While something waits for a peer that is away, look again this often.
_RETRY_S = 0.1
_IDLE_S = 1.0
_MESSAGE_OVERHEAD_BYTES = 1024 * 1024


class StoreLink(DealerThread):
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        transfers: Transfers,
        *,
        block_nbytes: int,
        metrics: WorkerMetrics,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        super().__init__(
            context,
            endpoint,
            name="store-link",
            max_message_bytes=block_nbytes + _MESSAGE_OVERHEAD_BYTES,
            on_fatal=on_fatal,
        )
        self._transfers = transfers
        transfers.wake_with(self.wake)
        self._metrics = metrics
        self._limited = LimitedLog()

    def on_turn(self) -> float:
        self._transfers.pump(self.send)
        if self._transfers.has_unsent:
            return _RETRY_S
        deadline_s = self._transfers.next_deadline_s()
        return _IDLE_S if deadline_s is None else min(_IDLE_S, deadline_s - time.monotonic())

    def on_frames(self, frames: list[zmq.Frame]) -> None:
        try:
            self._transfers.receive([frame.buffer for frame in frames])
        except DataLoss as error:
            self._metrics.frames_malformed.labels("store").inc()
            self._limited.warning(log, "malformed frames from the store", problem=str(error))

    def on_connection(self, connected: bool) -> None:
        log.info("store connected" if connected else "store away", endpoint=self._endpoint)
