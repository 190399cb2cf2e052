"""Workers of this machine that share memory with us: who they are, and what of ours they are reading.

A worker that said HELLO is offered a token; with it, it comes to a Unix socket, hands over its memory and
gets ours, to read. From then on the ZMQ peer that was given the token may name places, and messages without
values go over the connection. When that breaks the worker is gone, and so are its leases.
"""

import asyncio
import secrets
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence

from reprise_runtime.logs import LimitedLog, get_logger
from reprise_runtime.shared_memory import (
    TOKEN_NBYTES,
    Memory,
    MemoryConnection,
    accept_join,
    listen,
    receive_join,
)
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import Value
from reprise_wire.block_transfer import MemoryOffer, Place

MAX_OFFERS = 256
"""Tokens not yet used; past it the oldest is void, and its worker gets frames."""
MAX_PEERS = 64
"""Connections; further ones are closed, and their workers get frames."""
JOIN_TIMEOUT_S = 2.0
SWEEP_INTERVAL_S = 1.0


class MemoryPeer:
    """`leases`: per LOADED that is not yet released, until when, and the values that it keeps in place."""

    def __init__(self, name: bytes, memory: Memory | None, connection: MemoryConnection) -> None:
        """`name`: of the same worker on ZMQ."""
        self.name = name
        self.memory = memory
        self.leases: OrderedDict[int, tuple[float, Sequence[Value]]] = OrderedDict()
        self._connection = connection
        self._on_message: Callable[[MemoryPeer, bytes], None]
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()

    async def serve(self, on_message: "Callable[[MemoryPeer, bytes], None]") -> None:
        """Until the connection breaks, and raises the OSError that it broke with."""
        self._on_message = on_message
        self.resume()
        try:
            await self._ended
        finally:
            self.pause()

    def pause(self) -> None:
        """What comes then waits in the system's buffer until `resume`."""
        self._loop.remove_reader(self._connection)

    def resume(self) -> None:
        if not self._ended.done():
            self._loop.add_reader(self._connection, self._read)

    def send(self, message: bytes) -> bool:
        """Whether it is on its way. Raises OSError when the worker is gone."""
        return self._connection.send(message)

    def _read(self) -> None:
        try:
            message = self._connection.receive()
        except OSError as error:
            self.pause()
            self._ended.set_exception(error)
        else:
            if message is not None:
                self._on_message(self, message)


class MemoryPeers:
    def __init__(
        self, ours: Memory, index: Place | None, *, lease_timeout_s: float, metrics: StoreMetrics
    ) -> None:
        """`index`: where in our memory workers look for the host tier's blocks, if there is one."""
        self._ours = ours
        self._index = index
        self._lease_timeout_s = lease_timeout_s
        self._metrics = metrics
        self._offers: OrderedDict[bytes, bytes] = OrderedDict()  # token -> ZMQ peer
        self._peers: dict[bytes, MemoryPeer] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._address = ""
        self._listener: socket.socket
        self._log = get_logger()
        self._limited = LimitedLog()

    def bind(self, address: str) -> None:
        """`address` is a path, or empty for one without a file. Raises OSError."""
        self._address = address or f"@reprise-store-{secrets.token_hex(8)}"
        self._listener = listen(self._address)

    def offer(self, peer: bytes) -> MemoryOffer:
        token = secrets.token_bytes(TOKEN_NBYTES)
        self._offers[token] = peer
        if len(self._offers) > MAX_OFFERS:
            self._offers.popitem(last=False)
        return MemoryOffer(self._address, token, self._index)

    @property
    def any(self) -> bool:
        return bool(self._peers)

    def get(self, peer: bytes) -> MemoryPeer | None:
        return self._peers.get(peer)

    def lease(self, peer: MemoryPeer, transfer_id: int, values: Sequence[Value]) -> None:
        """Keeps the values in place until released, or for `lease_timeout_s`."""
        deadline_s = asyncio.get_running_loop().time() + self._lease_timeout_s
        peer.leases[transfer_id] = (deadline_s, values)
        self._metrics.memory_leases.inc()

    def release(self, peer: MemoryPeer, transfer_ids: Sequence[int]) -> None:
        """Ids without a lease are passed over: it may have run out."""
        for transfer_id in transfer_ids:
            if peer.leases.pop(transfer_id, None) is not None:
                self._metrics.memory_leases.dec()

    async def serve_forever(self, on_message: Callable[[MemoryPeer, bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        sweep = asyncio.ensure_future(self._sweep_forever())
        try:
            while True:
                connection, _ = await loop.sock_accept(self._listener)
                task = asyncio.ensure_future(self._serve(connection, on_message))
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)
        finally:
            sweep.cancel()

    async def close(self) -> None:
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._listener.close()

    async def _serve(
        self, connection: socket.socket, on_message: Callable[[MemoryPeer, bytes], None]
    ) -> None:
        peer: MemoryPeer | None = None
        with connection:
            try:
                async with asyncio.timeout(JOIN_TIMEOUT_S):
                    await _readable(connection)
                peer = self._join(connection)
                await peer.serve(on_message)
            except (OSError, TimeoutError) as error:
                if peer is None:
                    self._limited.warning(self._log, "no memory shared with a worker", problem=str(error))
            finally:
                if peer is not None:
                    self._leave(peer)

    def _join(self, connection: socket.socket) -> MemoryPeer:
        request = receive_join(connection)
        name = self._offers.pop(request.token, None)
        if name is None or len(self._peers) >= MAX_PEERS:
            raise OSError("unknown token" if name is None else f"{MAX_PEERS} workers share memory already")
        accept_join(connection, self._ours)
        self._peers[name] = peer = MemoryPeer(name, request.memory, MemoryConnection(connection))
        self._metrics.memory_peers.set(len(self._peers))
        return peer

    def _leave(self, peer: MemoryPeer) -> None:
        if self._peers.get(peer.name) is peer:  # it may have come again
            del self._peers[peer.name]
        self.release(peer, list(peer.leases))
        self._metrics.memory_peers.set(len(self._peers))

    async def _sweep_forever(self) -> None:
        """Ends leases that nobody releases. Their reader may still be at it: its checksum tells it."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now_s = asyncio.get_running_loop().time()
            for peer in self._peers.values():
                expired = [key for key, (deadline_s, _) in peer.leases.items() if deadline_s <= now_s]
                self._metrics.memory_leases_expired.inc(len(expired))
                self.release(peer, expired)


async def _readable(connection: socket.socket) -> None:
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)
