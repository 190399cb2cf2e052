"""A worker that loads block 0 by place and then holds its lease: `python -m support.lease_holder ENDPOINT
GENERATION`. It says "holding", and is there to be killed."""

import asyncio
import sys

import zmq
import zmq.asyncio

from support.store_harness import Peer, block_hashes, keys_of


async def hold(endpoint: str, generation: int) -> None:
    dealer = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    dealer.connect(endpoint)
    peer = Peer(dealer, keeps_leases=True)
    await peer.share_memory()
    loaded, values = await peer.load(generation, keys_of(block_hashes(1)))
    assert loaded.places[0].offset >= 0
    assert values[0]
    print("holding", flush=True)
    await asyncio.Event().wait()


asyncio.run(hold(sys.argv[1], int(sys.argv[2])))
