"""More saves than Redis takes, as a process of its own: `python -m support.save_flood REDIS_PORT`.

It says the port of a slow way to that Redis, is told `store BLOCKS_ENDPOINT GRPC_ADDRESS`, and then `on` and
`off`, which are answered by the number of blocks that the store took so far.
"""

import asyncio
import sys

import zmq
import zmq.asyncio

from reprise_runtime.grpc_server import channel
from reprise_wire.block_transfer import TransferKind
from reprise_wire.clients.store import StoreClient
from support.store_harness import KEYSPACE, Peer, block_hashes, keys_of
from support.tcp_proxy import TcpProxy

VALUE_NBYTES = 200_000
BATCH = 8
PAUSE_S = 0.02
"""Between batches: about 80 MB/s."""
SLOW_S = 0.02
"""For each 64 KiB on the way to Redis: a few MB/s for each of the store's connections."""


class Flood:
    def __init__(self, peer: Peer, client: StoreClient) -> None:
        self._peer = peer
        self._client = client
        self._value = bytes(VALUE_NBYTES)
        self.num_offered = 0
        self.on = asyncio.Event()

    async def run(self) -> None:
        generation = -1
        while True:
            await self.on.wait()
            keys = keys_of(block_hashes(BATCH, 1_000_000 + self.num_offered))
            answer = await self._peer.save(generation, keys, [self._value] * BATCH)
            if answer.kind == TransferKind.REFUSED and answer.reason == "generation":
                generation = (await self._client.lookup(KEYSPACE, [0], [])).generation
                continue
            assert answer.kind == TransferKind.SAVED, answer
            self.num_offered += BATCH
            await asyncio.sleep(PAUSE_S)


async def serve(redis_port: int) -> None:
    loop = asyncio.get_running_loop()
    flood: Flood | None = None
    async with TcpProxy(redis_port) as proxy:
        print(proxy.port, flush=True)
        while words := (await loop.run_in_executor(None, sys.stdin.readline)).split():
            if words[0] == "store":
                dealer = zmq.asyncio.Context.instance().socket(zmq.DEALER)
                dealer.connect(words[1])
                peer = Peer(dealer)
                await peer.share_memory()
                flood = Flood(peer, StoreClient(channel(words[2])))
                running = asyncio.ensure_future(flood.run())
                print("ready", flush=True)
                continue
            assert flood is not None
            assert not running.done(), running
            proxy.delay_s = SLOW_S if words[0] == "on" else 0.0
            flood.on.set() if words[0] == "on" else flood.on.clear()
            print(flood.num_offered, flush=True)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
