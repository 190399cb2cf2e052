"""The ZMQ side: workers save and load block bytes here (`reprise_wire.block_transfer`).

Nothing that a peer sends ends this: what is no message of the protocol is counted, logged at a limited
rate and answered with REFUSED where the transfer can be named.
"""

import asyncio
from collections.abc import Sequence
from time import monotonic

import msgspec
import zmq
import zmq.asyncio

from reprise_core.errors import DataLoss, InvalidInput, Unavailable
from reprise_runtime.logs import LimitedLog, get_logger
from reprise_store.keys import check_keys, check_keyspace
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import Value
from reprise_store.tiered_store import GenerationChanged, TieredStore
from reprise_wire.block_transfer import (
    TRANSFER_VERSION,
    Keyspace,
    TransferHeader,
    TransferKind,
    decode_transfer,
    encode_transfer,
)

HIGH_WATER_MESSAGES = 1000
"""Per worker and direction. Beyond it a worker's TCP connection is no longer read, and an answer to a
worker that does not read is dropped and counted."""


class BlockServer:
    """Saves are handled in order of arrival; up to `load_concurrency` loads run beside them.

    A load beyond `load_queue_requests` is refused as unavailable: the worker recomputes.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        store: TieredStore,
        metrics: StoreMetrics,
        load_concurrency: int,
        load_queue_requests: int,
        max_transfer_blocks: int,
        max_value_bytes: int,
    ) -> None:
        self._endpoint = endpoint
        self._store = store
        self._metrics = metrics
        self._load_slots = asyncio.Semaphore(load_concurrency)
        self._load_queue_requests = load_queue_requests
        self._max_transfer_blocks = max_transfer_blocks
        self._max_value_bytes = max_value_bytes
        self._loads: set[asyncio.Task[None]] = set()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._log = get_logger()
        self._limited = LimitedLog()

    def bind(self) -> str:
        """The endpoint in fact bound (port 0 or * gets a number). Raises Unavailable when it is taken."""
        self._socket.linger = 0
        self._socket.rcvhwm = HIGH_WATER_MESSAGES
        self._socket.sndhwm = HIGH_WATER_MESSAGES
        self._socket.maxmsgsize = self._max_value_bytes
        self._socket.router_mandatory = True
        self._socket.ipv6 = "[" in self._endpoint
        try:
            self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            raise Unavailable(f"cannot bind {self._endpoint}: {error.strerror}") from error
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.decode().rstrip("\0")

    async def serve_forever(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            await self._receive(frames)

    async def close(self) -> None:
        for load in tuple(self._loads):
            load.cancel()
        await asyncio.gather(*self._loads, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _receive(self, frames: Sequence[zmq.Frame]) -> None:
        peer, message = frames[0].bytes, [_view(frame) for frame in frames[1:]]
        try:
            header, keyspace = self._check(message)
        except (DataLoss, InvalidInput) as error:
            await self._malformed(peer, message, str(error))
            return
        if header.version != TRANSFER_VERSION:
            await self._refuse(peer, header.transfer_id, "version")
        elif header.kind == TransferKind.SAVE:
            await self._save(peer, header, keyspace, message[1:])
        elif len(self._loads) >= self._load_queue_requests:
            await self._refuse(peer, header.transfer_id, "unavailable")
        else:
            self._start_load(peer, header, keyspace)

    def _check(self, message: Sequence[memoryview]) -> tuple[TransferHeader, Keyspace]:
        header = decode_transfer(message)
        if header.version != TRANSFER_VERSION:
            return header, Keyspace("", "")
        if header.kind not in (TransferKind.SAVE, TransferKind.LOAD):
            raise InvalidInput("kind", f"{header.kind[:20]!r}, must be save or load")
        if header.keyspace is None:
            raise InvalidInput("keyspace", f"missing in a {header.kind}")
        if len(header.keys) > self._max_transfer_blocks:
            raise InvalidInput("keys", f"{len(header.keys)} blocks, at most {self._max_transfer_blocks}")
        check_keyspace(header.keyspace)
        check_keys(header.keyspace, header.keys)
        return header, header.keyspace

    async def _save(
        self, peer: bytes, header: TransferHeader, keyspace: Keyspace, values: Sequence[Value]
    ) -> None:
        try:
            accepted = await self._store.save(
                keyspace, header.generation, list(zip(header.keys, values, strict=True))
            )
        except GenerationChanged:
            await self._refuse(peer, header.transfer_id, "generation")
            return
        saved = TransferHeader(
            version=TRANSFER_VERSION,
            kind=TransferKind.SAVED,
            transfer_id=header.transfer_id,
            generation=header.generation,
            accepted=tuple(accepted),
        )
        await self._send(peer, saved)

    def _start_load(self, peer: bytes, header: TransferHeader, keyspace: Keyspace) -> None:
        load = asyncio.ensure_future(self._load(peer, header, keyspace))
        self._loads.add(load)
        self._metrics.loads_waiting.set(len(self._loads))
        load.add_done_callback(self._load_done)

    def _load_done(self, load: asyncio.Task[None]) -> None:
        self._loads.discard(load)
        self._metrics.loads_waiting.set(len(self._loads))
        if not load.cancelled() and load.exception() is not None:
            self._limited.warning(self._log, "load failed", error=repr(load.exception()))

    async def _load(self, peer: bytes, header: TransferHeader, keyspace: Keyspace) -> None:
        started_s = monotonic()
        async with self._load_slots:
            try:
                loaded = await self._store.load(keyspace, header.generation, header.keys)
            except GenerationChanged:
                await self._refuse(peer, header.transfer_id, "generation")
                return
        answer = TransferHeader(
            version=TRANSFER_VERSION,
            kind=TransferKind.LOADED,
            transfer_id=header.transfer_id,
            generation=header.generation,
            keys=header.keys,
        )
        await self._send(peer, answer, [value if value is not None else b"" for value in loaded.values])
        self._metrics.load_seconds.observe(monotonic() - started_s)

    async def _malformed(self, peer: bytes, message: Sequence[memoryview], problem: str) -> None:
        self._metrics.malformed.inc()
        self._limited.warning(self._log, "malformed transfer", problem=problem, num_frames=len(message))
        transfer_id = _transfer_id_of(message)
        if transfer_id is not None:
            await self._refuse(peer, transfer_id, "malformed")

    async def _refuse(self, peer: bytes, transfer_id: int, reason: str) -> None:
        self._metrics.refused.labels(reason).inc()
        refused = TransferHeader(
            version=TRANSFER_VERSION, kind=TransferKind.REFUSED, transfer_id=transfer_id, reason=reason
        )
        await self._send(peer, refused)

    async def _send(self, peer: bytes, header: TransferHeader, values: Sequence[Value] = ()) -> None:
        try:
            await self._socket.send_multipart(
                [peer, encode_transfer(header), *values], flags=zmq.DONTWAIT, copy=False
            )
        except zmq.ZMQError as error:
            # EAGAIN: it does not read its answers. EHOSTUNREACH: it is gone.
            self._metrics.replies_dropped.inc()
            self._limited.warning(self._log, "answer dropped", error=str(error))


def _view(frame: zmq.Frame) -> memoryview:
    """The frame's bytes without a copy; the view keeps the message alive."""
    buffer = frame.buffer
    return buffer if isinstance(buffer, memoryview) else memoryview(buffer)


def _transfer_id_of(message: Sequence[memoryview]) -> int | None:
    """Which transfer a message that failed the checks was, as far as it can be read."""
    try:
        header = msgspec.msgpack.decode(message[0]) if message else None
    except (msgspec.DecodeError, ValueError):
        return None
    match header:
        case [int(), str(), int(transfer_id), *_]:
            return transfer_id
        case _:
            return None
