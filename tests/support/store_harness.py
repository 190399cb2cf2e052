"""A whole store in this process on free ports, and a worker's side of the block socket."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

import zmq
import zmq.asyncio

from reprise_core.ids import BlockHash
from reprise_runtime.grpc_server import channel
from reprise_runtime.shared_memory import Memory, MemoryConnection, join, make_memory, read_into
from reprise_store.app import StoreApp
from reprise_store.settings import StoreSettings
from reprise_wire.block_transfer import (
    TRANSFER_VERSION,
    BlockKey,
    Keyspace,
    Place,
    TransferHeader,
    TransferKind,
    decode_transfer,
    encode_transfer,
    parse_redis_key,
)
from reprise_wire.clients.store import StoreClient
from support.valkey_server import free_port
from support.waiting import until

Group = TypeVar("Group", bound=Hashable)
KEYSPACE = Keyspace("test", "ab" * 16)
ANSWER_TIMEOUT_S = 5.0
SETTLE_TIMEOUT_S = 30.0
STAGING_BYTES = 64 * 1024 * 1024


class Way:
    """How the peers of stores that are started from here on exchange values with them; fixtures set it."""

    shares_memory = False


def block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def block_hashes(num_blocks: int, start: int = 0) -> list[BlockHash]:
    return [block_hash(start + i) for i in range(num_blocks)]


def keys_of(hashes: Sequence[BlockHash], rank: int = 0, group_id: int = 0) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(rank, group_id, digest) for digest in hashes)


def hashes_by(names: Iterable[bytes], group: Callable[[Keyspace, int], Group]) -> dict[Group, set[BlockHash]]:
    """Block hashes of Redis' keys, by what `group` makes of keyspace and generation."""
    found: dict[Group, set[BlockHash]] = {}
    for name in names:
        if name.count(b":") > 2:  # a generation's has two
            keyspace, generation, key = parse_redis_key(name.decode())
            found.setdefault(group(keyspace, generation), set()).add(key.block_hash)
    return found


@dataclass
class Peer:
    """A worker as the contract has it: one DEALER, and after `share_memory` values by place and messages
    without values over that connection."""

    socket: zmq.asyncio.Socket
    ids: "count[int]" = field(default_factory=lambda: count(1))
    own: Memory | None = None
    theirs: Memory | None = None
    connection: MemoryConnection | None = None
    keeps_leases: bool = False

    async def share_memory(self) -> None:
        """Raises OSError when the store does not share."""
        hello = TransferHeader(TRANSFER_VERSION, TransferKind.HELLO, next(self.ids))
        await self.socket.send(encode_transfer(hello))
        welcome, _ = await self.receive()
        assert welcome.kind == TransferKind.WELCOME
        if welcome.memory is None:
            raise OSError("the store offers no memory")
        self.own = make_memory("test-worker", STAGING_BYTES)
        self.connection, self.theirs = await asyncio.to_thread(
            join, welcome.memory.address, welcome.memory.token, self.own, timeout_s=ANSWER_TIMEOUT_S
        )

    def leave(self) -> None:
        """As the kernel does it for a worker that is killed."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    async def release(self, *transfer_ids: int) -> None:
        released = TransferHeader(
            TRANSFER_VERSION, TransferKind.RELEASE, next(self.ids), released=transfer_ids
        )
        await self.send([encode_transfer(released)])

    def stage(self, values: Sequence[bytes]) -> tuple[Place, ...]:
        assert self.own is not None
        places, offset = [], 0
        for value in values:
            os.pwrite(self.own.fd, value, offset)
            places.append(Place(offset, len(value)))
            offset += len(value)
        return tuple(places)

    def read(self, places: Sequence[Place], frames: Sequence[bytes]) -> list[bytes]:
        assert self.theirs is not None
        rest, values = iter(frames), []
        for place in places:
            value = bytearray(place.nbytes)
            if place.offset >= 0:
                read_into(self.theirs, place.offset, value)
            values.append(next(rest) if place.offset < 0 else bytes(value))
        return values

    async def ask(
        self, kind: TransferKind, generation: int, keys: Sequence[BlockKey], values: Sequence[bytes] = (), *,
        keyspace: Keyspace = KEYSPACE, version: int = TRANSFER_VERSION,
        places: Sequence[Place] = (),
    ) -> tuple[TransferHeader, list[bytes]]:  # fmt: skip
        transfer_id = next(self.ids)
        header = TransferHeader(
            version, kind, transfer_id, keyspace, generation, tuple(keys), places=tuple(places)
        )
        await self.send([encode_transfer(header), *values])
        answer, got = await self.receive()
        assert answer.transfer_id == transfer_id
        return answer, got

    async def send(self, frames: Sequence[bytes]) -> None:
        if self.connection is None or len(frames) > 1:
            await self.socket.send_multipart(frames)
        else:
            assert self.connection.send(frames[0])

    async def receive(self) -> tuple[TransferHeader, list[bytes]]:
        """From whichever way has a message."""
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline_s:
            message = self.connection.receive() if self.connection is not None else None
            if message is not None:
                return decode_transfer([message]), []
            if await self.socket.poll(1):
                frames = await self.socket.recv_multipart()
                return decode_transfer(frames), list(frames[1:])
        raise TimeoutError("the store does not answer")

    async def save(
        self,
        generation: int,
        keys: Sequence[BlockKey],
        values: Sequence[bytes],
        keyspace: Keyspace = KEYSPACE,
    ) -> TransferHeader:
        frames, places = (values, ()) if self.own is None else ((), self.stage(values))
        answer, _ = await self.ask(
            TransferKind.SAVE, generation, keys, frames, keyspace=keyspace, places=places
        )
        return answer

    async def load(
        self, generation: int, keys: Sequence[BlockKey], keyspace: Keyspace = KEYSPACE
    ) -> tuple[TransferHeader, list[bytes]]:
        answer, frames = await self.ask(TransferKind.LOAD, generation, keys, keyspace=keyspace)
        if not answer.places:
            return answer, frames
        values = self.read(answer.places, frames)
        if not self.keeps_leases:
            await self.release(answer.transfer_id)
        return answer, values


@dataclass
class RunningStore:
    app: StoreApp
    client: StoreClient
    peer: Peer

    def metric(self, name: str, **labels: str) -> float:
        return self.app.registry.get_sample_value(f"reprise_store_{name}", labels) or 0.0

    async def settled(self) -> None:
        """Waits until nothing is queued for Redis; while that is away, until it is back or all is too old."""
        assert self.app._write_behind is not None
        self.app._write_behind.check_invariants()
        await asyncio.wait_for(self.app._write_behind._idle.wait(), SETTLE_TIMEOUT_S)

    async def until_redis_is(self, up: bool, timeout_s: float = 10.0) -> None:
        await until(lambda: self.app.store.stats().redis_connected is up, timeout_s)


@asynccontextmanager
async def running_store(**settings: object) -> AsyncIterator[RunningStore]:
    defaults: dict[str, object] = {
        "listen_address": f"127.0.0.1:{free_port()}",
        "blocks_endpoint": "tcp://127.0.0.1:*",
        "breaker_cooldown_s": 0.2,
    }
    app = StoreApp(StoreSettings(**{**defaults, **settings}))
    await app.start()
    running = asyncio.ensure_future(app.run())
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(app.blocks_endpoint)
    grpc_channel = channel(app._settings.listen_address, own_connection=True)
    peer = Peer(dealer)
    try:
        if Way.shares_memory:
            await peer.share_memory()
        yield RunningStore(app, StoreClient(grpc_channel), peer)
        assert not running.done() or running.cancelled() or running.exception() is None
    finally:
        peer.leave()
        await grpc_channel.close()
        dealer.close()
        context.term()
        await app.stop()  # `run` goes on meanwhile, as in a service: its writers drain the queue
        running.cancel()
