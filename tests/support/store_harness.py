"""A whole store in this process on free ports, and a worker's side of the block socket."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import zmq
import zmq.asyncio

from reprise_core.ids import BlockHash
from reprise_runtime.grpc_server import channel
from reprise_store.app import StoreApp
from reprise_store.settings import StoreSettings
from reprise_wire.block_transfer import (
    TRANSFER_VERSION,
    BlockKey,
    Keyspace,
    TransferHeader,
    TransferKind,
    decode_transfer,
    encode_transfer,
)
from reprise_wire.clients.store import StoreClient
from support.valkey_server import free_port
from support.waiting import until

KEYSPACE = Keyspace("test", "ab" * 16)
ANSWER_TIMEOUT_S = 5.0


def block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def block_hashes(num_blocks: int, start: int = 0) -> list[BlockHash]:
    return [block_hash(start + i) for i in range(num_blocks)]


def keys_of(hashes: Sequence[BlockHash], rank: int = 0, group_id: int = 0) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(rank, group_id, digest) for digest in hashes)


@dataclass
class Peer:
    """A worker as the contract has it: one DEALER."""

    socket: zmq.asyncio.Socket
    ids: "count[int]" = field(default_factory=lambda: count(1))

    async def ask(
        self, kind: TransferKind, generation: int, keys: Sequence[BlockKey], values: Sequence[bytes] = (), *,
        keyspace: Keyspace = KEYSPACE, version: int = TRANSFER_VERSION,
    ) -> tuple[TransferHeader, list[bytes]]:  # fmt: skip
        transfer_id = next(self.ids)
        header = TransferHeader(version, kind, transfer_id, keyspace, generation, tuple(keys))
        await self.socket.send_multipart([encode_transfer(header), *values])
        answer, got = await self.receive()
        assert answer.transfer_id == transfer_id
        return answer, got

    async def receive(self) -> tuple[TransferHeader, list[bytes]]:
        frames = await asyncio.wait_for(self.socket.recv_multipart(), ANSWER_TIMEOUT_S)
        return decode_transfer(frames), list(frames[1:])

    async def save(
        self,
        generation: int,
        keys: Sequence[BlockKey],
        values: Sequence[bytes],
        keyspace: Keyspace = KEYSPACE,
    ) -> TransferHeader:
        answer, _ = await self.ask(TransferKind.SAVE, generation, keys, values, keyspace=keyspace)
        return answer

    async def load(
        self, generation: int, keys: Sequence[BlockKey], keyspace: Keyspace = KEYSPACE
    ) -> tuple[TransferHeader, list[bytes]]:
        return await self.ask(TransferKind.LOAD, generation, keys, keyspace=keyspace)


@dataclass
class RunningStore:
    app: StoreApp
    client: StoreClient
    peer: Peer

    def metric(self, name: str, **labels: str) -> float:
        return self.app.registry.get_sample_value(f"reprise_store_{name}", labels) or 0.0

    async def settled(self) -> None:
        """Waits until nothing is queued for Redis."""
        assert self.app._write_behind is not None
        await asyncio.wait_for(self.app._write_behind._idle.wait(), ANSWER_TIMEOUT_S)

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
    grpc_channel = channel(app._settings.listen_address)
    try:
        yield RunningStore(app, StoreClient(grpc_channel), Peer(dealer))
        assert not running.done() or running.cancelled() or running.exception() is None
    finally:
        await grpc_channel.close()
        dealer.close()
        context.term()
        await app.stop()  # `run` goes on meanwhile, as in a service: its writers drain the queue
        running.cancel()
