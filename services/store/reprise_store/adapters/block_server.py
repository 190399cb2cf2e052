"""Workers save and load block bytes here (`reprise_wire.block_transfer`).

Nothing that a peer sends ends this: what is no message of the protocol is counted, logged at a limited
rate and answered with REFUSED where the transfer can be named.

With a worker that shares memory, saved values are copied out of its memory before the answer, and loaded
ones stay in the arena under a lease. What found no room in the arena travels as a frame, over ZMQ; messages
without values go over the connection that shares the memory.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from time import monotonic
from typing import Any

import msgspec
import zmq

from reprise_core.errors import DataLoss, InvalidInput
from reprise_runtime.logs import LimitedLog, get_logger
from reprise_runtime.zmq_sockets import SocketReader, bind
from reprise_store.adapters.memory_peers import MemoryPeer, MemoryPeers
from reprise_store.adapters.shared_arena import SharedArena
from reprise_store.keys import check_keys, check_keyspace
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import Value
from reprise_store.tiered_store import GenerationChanged, TieredStore
from reprise_wire.block_transfer import (
    TRANSFER_VERSION,
    Keyspace,
    Place,
    TransferHeader,
    TransferKind,
    decode_transfer,
    encode_transfer,
)

HIGH_WATER_MESSAGES = 1000
"""Per worker and direction. Beyond it a worker's TCP connection is no longer read, and an answer to a
worker that does not read is dropped and counted."""

MAX_COPY_ON_LOOP_BYTES = 2 * 1024 * 1024
"""More is copied in a thread, so that no look-up waits longer than for this (some 0.4 ms)."""


class BlockServer:
    """Saves are handled in order of arrival, and what comes behind one on the same way (ZMQ, or a worker's
    own connection) waits for it; up to `load_concurrency` loads run beside them.

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
        arena: SharedArena | None = None,
        memory_peers: MemoryPeers | None = None,
    ) -> None:
        """`arena` and `memory_peers` come together; without them every value is a frame."""
        self._arena = arena
        self._memory_peers = memory_peers
        self._endpoint = endpoint
        self._store = store
        self._metrics = metrics
        self._load_slots = asyncio.Semaphore(load_concurrency)
        self._load_queue_requests = load_queue_requests
        self._max_transfer_blocks = max_transfer_blocks
        self._max_value_bytes = max_value_bytes
        self._loads: set[asyncio.Task[None]] = set()
        self._saves: set[asyncio.Task[None]] = set()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._reader = SocketReader(self._socket, self._receive, copy=False)
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
        return bind(self._socket, self._endpoint)

    def start(self) -> None:
        """Serves from now on."""
        self._reader.start()

    async def close(self) -> None:
        self._reader.stop()
        transfers = [*self._loads, *self._saves]
        for transfer in transfers:
            transfer.cancel()
        await asyncio.gather(*transfers, return_exceptions=True)
        self._socket.close()
        self._context.term()

    def receive_by_memory(self, peer: MemoryPeer, message: bytes) -> None:
        """One that came over the connection that shares memory."""
        self._take(peer, peer.name, [message])

    def _receive(self, frames: Sequence[zmq.Frame]) -> None:
        self._take(self._reader, frames[0].bytes, [_view(frame) for frame in frames[1:]])

    def _take(self, way: SocketReader | MemoryPeer, peer: bytes, message: Sequence[Value]) -> None:
        try:
            header, keyspace = self._check(message)
        except (DataLoss, InvalidInput) as error:
            self._malformed(peer, message, str(error))
            return
        if header.version != TRANSFER_VERSION:
            self._refuse(peer, header.transfer_id, "version")
        elif header.kind == TransferKind.HELLO:
            self._welcome(peer, header.transfer_id)
        elif header.kind == TransferKind.RELEASE:
            self._release(peer, header.released)
        elif header.kind == TransferKind.READ:
            self._store.was_read(keyspace, header.generation, header.keys)
        elif header.kind == TransferKind.SAVE:
            self._start_save(way, self._save(peer, header, keyspace, message[1:]))
        elif len(self._loads) >= self._load_queue_requests:
            self._refuse(peer, header.transfer_id, "unavailable")
        else:
            self._start_load(self._load(peer, header, keyspace))

    def _check(self, message: Sequence[Value]) -> tuple[TransferHeader, Keyspace]:
        header = decode_transfer(message)
        if header.version != TRANSFER_VERSION or header.kind in (TransferKind.HELLO, TransferKind.RELEASE):
            return header, Keyspace("", "")
        if header.kind not in (TransferKind.SAVE, TransferKind.LOAD, TransferKind.READ):
            raise InvalidInput("kind", f"{header.kind[:20]!r}, must be hello, save, load, read or release")
        if header.keyspace is None:
            raise InvalidInput("keyspace", f"missing in a {header.kind}")
        if len(header.keys) > self._max_transfer_blocks:
            raise InvalidInput("keys", f"{len(header.keys)} blocks, at most {self._max_transfer_blocks}")
        check_keyspace(header.keyspace)
        check_keys(header.keyspace, header.keys)
        for index, place in enumerate(header.places):
            if place.offset < 0 or not 0 <= place.nbytes <= self._max_value_bytes:
                raise InvalidInput(
                    f"places[{index}]",
                    f"{place}, must be at most {self._max_value_bytes} bytes at 0 or later",
                )
        return header, header.keyspace

    def _welcome(self, peer: bytes, transfer_id: int) -> None:
        memory = self._memory_peers.offer(peer) if self._memory_peers is not None else None
        welcome = TransferHeader(
            version=TRANSFER_VERSION, kind=TransferKind.WELCOME, transfer_id=transfer_id, memory=memory
        )
        self._send(peer, welcome)

    def _release(self, peer: bytes, transfer_ids: Sequence[int]) -> None:
        sharing = self._sharing(peer)
        if sharing is not None and self._memory_peers is not None:
            self._memory_peers.release(sharing, transfer_ids)

    def _sharing(self, peer: bytes) -> MemoryPeer | None:
        return self._memory_peers.get(peer) if self._memory_peers is not None else None

    def _start_save(self, way: SocketReader | MemoryPeer, save: Coroutine[Any, Any, None]) -> None:
        way.pause()
        saving = asyncio.ensure_future(save)
        self._saves.add(saving)
        saving.add_done_callback(lambda save: self._save_done(way, save))

    def _save_done(self, way: SocketReader | MemoryPeer, save: asyncio.Task[None]) -> None:
        self._saves.discard(save)
        way.resume()
        self._tell_failure(save)

    async def _save(
        self, peer: bytes, header: TransferHeader, keyspace: Keyspace, values: Sequence[Value]
    ) -> None:
        if header.places:
            try:
                values = await self._fetch_saved(peer, header.places)
            except OSError as error:
                self._limited.warning(self._log, "a worker's memory cannot be read", problem=str(error))
                self._refuse(peer, header.transfer_id, "memory")
                return
        elif self._memory_peers is not None and self._memory_peers.any:
            values = [value for value in await self._land(values) if value is not None]
        try:
            accepted = await self._store.save(
                keyspace, header.generation, list(zip(header.keys, values, strict=True))
            )
        except GenerationChanged:
            self._refuse(peer, header.transfer_id, "generation")
            return
        saved = TransferHeader(
            version=TRANSFER_VERSION,
            kind=TransferKind.SAVED,
            transfer_id=header.transfer_id,
            generation=header.generation,
            accepted=tuple(accepted),
        )
        self._send(peer, saved)

    async def _land(self, values: Sequence[Value | None]) -> list[Value | None]:
        """The values in shared memory, as far as there is room."""
        arena = self._arena
        assert arena is not None
        to_copy = sum(len(value) for value in values if value and arena.place_of(value) is None)
        if not to_copy:
            return list(values)

        def land() -> list[Value | None]:
            return [arena.land(value) if value else value for value in values]

        return land() if to_copy <= MAX_COPY_ON_LOOP_BYTES else await asyncio.to_thread(land)

    async def _fetch_saved(self, peer: bytes, places: Sequence[Place]) -> list[Value]:
        """Raises OSError when the worker shares no memory (any more), or less than it says."""
        sharing = self._sharing(peer)
        if sharing is None or sharing.memory is None or self._arena is None:
            raise OSError("it shares no memory")
        if sum(place.nbytes for place in places) <= MAX_COPY_ON_LOOP_BYTES:
            return self._arena.land_from(sharing.memory, places)
        return await asyncio.to_thread(self._arena.land_from, sharing.memory, places)

    def _start_load(self, load: Coroutine[Any, Any, None]) -> None:
        loading = asyncio.ensure_future(load)
        self._loads.add(loading)
        self._metrics.loads_waiting.set(len(self._loads))
        loading.add_done_callback(self._load_done)

    def _load_done(self, load: asyncio.Task[None]) -> None:
        self._loads.discard(load)
        self._metrics.loads_waiting.set(len(self._loads))
        self._tell_failure(load)

    def _tell_failure(self, transfer: asyncio.Task[None]) -> None:
        if not transfer.cancelled() and transfer.exception() is not None:
            self._limited.warning(self._log, "transfer failed", error=repr(transfer.exception()))

    async def _load(self, peer: bytes, header: TransferHeader, keyspace: Keyspace) -> None:
        started_s = monotonic()
        land = self._land if self._sharing(peer) is not None else None
        async with self._load_slots:
            try:
                loaded = await self._store.load(keyspace, header.generation, header.keys, land)
            except GenerationChanged:
                self._refuse(peer, header.transfer_id, "generation")
                return
        values: list[Value] = [value if value is not None else b"" for value in loaded.values]
        places = self._lease(peer, header.transfer_id, values)
        answer = TransferHeader(
            version=TRANSFER_VERSION,
            kind=TransferKind.LOADED,
            transfer_id=header.transfer_id,
            generation=header.generation,
            places=places,
        )
        if places:
            values = [value for value, place in zip(values, places, strict=True) if place.offset < 0]
        if not self._send(peer, answer, values):
            self._release(peer, [header.transfer_id])
        self._metrics.load_seconds.observe(monotonic() - started_s)

    def _lease(self, peer: bytes, transfer_id: int, values: Sequence[Value]) -> tuple[Place, ...]:
        """Where the values are, for a worker that shares memory; else nothing."""
        sharing = self._sharing(peer)
        if sharing is None or self._arena is None or self._memory_peers is None:
            return ()
        found = [self._arena.place_of(value) for value in values]
        kept = [value for value, place in zip(values, found, strict=True) if place is not None]
        if kept:
            self._memory_peers.lease(sharing, transfer_id, kept)
        return tuple(
            place or Place(-1 if len(value) else 0, len(value))
            for place, value in zip(found, values, strict=True)
        )

    def _malformed(self, peer: bytes, message: Sequence[Value], problem: str) -> None:
        self._metrics.malformed.inc()
        self._limited.warning(self._log, "malformed transfer", problem=problem, num_frames=len(message))
        transfer_id = _transfer_id_of(message)
        if transfer_id is not None:
            self._refuse(peer, transfer_id, "malformed")

    def _refuse(self, peer: bytes, transfer_id: int, reason: str) -> None:
        self._metrics.refused.labels(reason).inc()
        refused = TransferHeader(
            version=TRANSFER_VERSION, kind=TransferKind.REFUSED, transfer_id=transfer_id, reason=reason
        )
        self._send(peer, refused)

    def _send(self, peer: bytes, header: TransferHeader, values: Sequence[Value] = ()) -> bool:
        """Whether it is on its way."""
        sharing, problem = self._sharing(peer), ""
        try:
            if sharing is None or values:
                self._send_by_zmq(peer, [encode_transfer(header), *values])
            elif not sharing.send(encode_transfer(header)):
                problem = "it does not read its answers"
        except (zmq.ZMQError, OSError) as error:
            # EAGAIN: it does not read its answers. EHOSTUNREACH, EPIPE: it is gone.
            problem = str(error)
        if problem:
            self._metrics.replies_dropped.inc()
            self._limited.warning(self._log, "answer dropped", error=problem)
        return not problem

    def _send_by_zmq(self, peer: bytes, message: Sequence[Value]) -> None:
        try:
            self._socket.send_multipart([peer, *message], flags=zmq.DONTWAIT, copy=False)
        finally:
            self._reader.kick()


def _view(frame: zmq.Frame) -> memoryview:
    """The frame's bytes without a copy; the view keeps the message alive."""
    buffer = frame.buffer
    return buffer if isinstance(buffer, memoryview) else memoryview(buffer)


def _transfer_id_of(message: Sequence[Value]) -> int | None:
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
