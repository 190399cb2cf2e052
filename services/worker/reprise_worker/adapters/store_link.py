"""The thread that carries block values between staging, cache and store.

On every connection the worker says HELLO until the store answers; a store of this machine then offers
shared memory. Where it cannot be had, the values are messages, and a log line says why.

A message without values goes over the connection that shares the memory, where there is one: there are no
threads of ZMQ's in between. HELLO, WELCOME and what carries values go over ZMQ.
"""

import time
from collections.abc import Callable, Sequence

import zmq

from reprise_core.errors import DataLoss
from reprise_runtime.logs import LimitedLog, get_logger
from reprise_runtime.shared_memory import Memory, MemoryConnection, join
from reprise_wire.block_transfer import (
    TRANSFER_VERSION,
    MemoryOffer,
    TransferHeader,
    TransferKind,
    decode_transfer,
    encode_transfer,
)
from reprise_wire.host_index import HostIndex
from reprise_worker.adapters.dealer import DealerThread
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.transfer import Transfers

log = get_logger()

# While something waits for a peer that is away, look again this often.
_RETRY_S = 0.1
_IDLE_S = 1.0
_HELLO_AGAIN_S = 1.0
_JOIN_TIMEOUT_S = 1.0
# How long a load waits for a store that left: one that was just looked up is back, and its socket soon.
_AWAY_GRACE_S = 2.0
_MESSAGE_OVERHEAD_BYTES = 1024 * 1024


class StoreLink(DealerThread):
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        transfers: Transfers,
        *,
        block_nbytes: int,
        shared_memory: bool,
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
        self._shared_memory = shared_memory
        self._metrics = metrics
        self._limited = LimitedLog()
        self._greeting = False  # connected, and no answer to HELLO yet
        self._hello_at_s = 0.0
        self._welcome = False
        self._refused = False
        self._away = False  # it was there and left; before the first connection it is only late
        self._memory_connection: MemoryConnection | None = None

    def on_turn(self) -> float:
        now_s = time.monotonic()
        if self._greeting and now_s >= self._hello_at_s:
            self.send([encode_transfer(self._transfers.hello())])
            self._hello_at_s = now_s + _HELLO_AGAIN_S
        if self._refused:
            self._transfers.refuse_all()
        elif self._away:
            self._transfers.fail_loads(older_than_s=_AWAY_GRACE_S)
        self._transfers.pump(self._send if self._welcome else _nobody)
        if self._transfers.has_unread:
            return 0.0
        if self._greeting or self._transfers.has_unsent:
            return _RETRY_S
        deadline_s = self._transfers.next_deadline_s()
        return _IDLE_S if deadline_s is None else min(_IDLE_S, deadline_s - time.monotonic())

    def on_frames(self, frames: list[zmq.Frame]) -> None:
        self._take([frame.buffer for frame in frames])

    def _take(self, frames: Sequence[bytes | memoryview]) -> None:
        try:
            self._receive(decode_transfer(frames), frames[1:])
        except DataLoss as error:
            self._metrics.frames_malformed.labels("store").inc()
            self._limited.warning(log, "malformed frames from the store", problem=str(error))

    def on_connection(self, connected: bool) -> None:
        log.info("store connected" if connected else "store away", endpoint=self._endpoint)
        self._begin_again(greeting=connected)
        self._away = not connected

    def stop(self) -> None:
        super().stop()
        self._close_memory_connection()

    def _send(self, frames: Sequence[bytes | memoryview]) -> bool:
        connection = self._memory_connection
        if connection is None or len(frames) > 1:
            return self.send(frames)
        try:
            return connection.send(frames[0])
        except OSError:
            return False  # its end is read in a moment

    def _receive_by_memory(self) -> None:
        connection = self._memory_connection
        try:
            while connection is not None and connection is self._memory_connection:
                message = connection.receive()
                if message is None:
                    return
                self._take([message])
        except OSError as error:
            log.info("the store shares its memory no more", reason=str(error))
            self._begin_again(greeting=True)

    def _receive(self, header: TransferHeader, values: Sequence[bytes | memoryview]) -> None:
        if header.kind == TransferKind.REFUSED and header.reason == "version":
            self._refuse_store(header.version)
        elif header.version != TRANSFER_VERSION:
            raise DataLoss(f"transfer version {header.version}, ours is {TRANSFER_VERSION}")
        elif header.kind == TransferKind.WELCOME:
            self._greet_back(header.memory)
        else:
            self._transfers.receive(header, values)
            if header.kind == TransferKind.REFUSED and header.reason == "memory":
                self._begin_again(greeting=True)  # it knows nothing of our memory

    def _greet_back(self, offer: MemoryOffer | None) -> None:
        if not self._greeting:
            return  # the answer to a repeated HELLO
        self._greeting, self._welcome = False, True
        shared = self._join(offer) if offer is not None else None
        if shared is None:
            self._transfers.store_arrived()
        else:
            self._transfers.store_arrived(*shared)

    def _join(self, offer: MemoryOffer) -> tuple[Memory, HostIndex | None] | None:
        if not self._shared_memory:
            return None
        try:
            connection, memory = join(
                offer.address, offer.token, self._transfers.staging_memory, timeout_s=_JOIN_TIMEOUT_S
            )
            place = offer.index
            index = HostIndex(memory.view(place.offset, place.nbytes)) if place is not None else None
        except (OSError, ValueError) as error:
            log.info("block bytes go through the socket: no memory shared with the store", reason=str(error))
            return None
        self._memory_connection = connection
        self.watch(connection.fileno(), self._receive_by_memory)
        log.info("block bytes go through shared memory", endpoint=self._endpoint)
        return memory, index

    def _refuse_store(self, version: int) -> None:
        self._greeting, self._refused = False, True
        log.error(
            "the store speaks another version of the block protocol: nothing is saved or loaded",
            store=version,
            worker=TRANSFER_VERSION,
        )

    def _begin_again(self, *, greeting: bool) -> None:
        self._welcome = self._refused = False
        self._close_memory_connection()
        self._transfers.store_left()
        self._greeting = greeting
        self._hello_at_s = 0.0

    def _close_memory_connection(self) -> None:
        if self._memory_connection is not None:
            self.unwatch(self._memory_connection.fileno())
            self._memory_connection.close()
            self._memory_connection = None


def _nobody(frames: Sequence[bytes | memoryview]) -> bool:
    """Sends to a store that is not there."""
    return False
