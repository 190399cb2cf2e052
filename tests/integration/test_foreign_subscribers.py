"""Subscribers that are not ours end with exactly what the KV cache manager holds."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from support.cache_workload import CacheWorkload
from support.event_feeder import EventFeeder, fed_publisher, published
from support.plain_subscriber import PlainSubscriber
from support.waiting import until

U64 = 2**64 - 1
WORKER = 7


def seeded() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


async def feed(feeder: EventFeeder, steps: int) -> None:
    for _ in range(steps):
        feeder.step()
        await asyncio.sleep(0)


@pytest.mark.parametrize("skip_every", [0, 7])
async def test_a_plain_subscriber_has_the_managers_live_hashes(skip_every: int) -> None:
    async with fed_publisher(seeded(), host_blocks=200, heartbeat_s=0.2) as (publisher, feeder):
        await feed(feeder, 50)
        sockets = publisher.app.sockets
        assert sockets is not None
        subscriber = PlainSubscriber(sockets.events_endpoint, sockets.replay_endpoint, skip_every=skip_every)
        try:
            await feed(feeder, 150)
            feeder.reset()
            await feed(feeder, 150)
            truth = feeder.workload.truth()
            await until(lambda: subscriber.held == truth, 30)
            assert subscriber.num_replayed > 0
        finally:
            subscriber.close()


class RadixFeeder:
    """NVIDIA Dynamo's index, fed from the wire form of our events.

    It keeps one copy of a block per worker, so copies are counted here; it refuses a block whose parent it
    does not have, and drops what hangs below a block that is removed.
    """

    def __init__(self, dynamo: Any) -> None:
        self._local = dynamo.compute_block_hash_for_seq
        self.tree = dynamo.RadixTree()
        self._copies: Counter[int] = Counter()
        self._event_id = 0
        self.num_early_removals = 0
        """Removals of a block whose children were still there."""
        self._children: Counter[int] = Counter()
        self._parents: dict[int, int | None] = {}

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self._copies.clear()
            self._children.clear()
            self._send("cleared")
        elif event["type"] == "BlockStored":
            self._store(event)
        else:
            self._remove(event)

    def scores(self, prompt: list[int], block_size: int) -> int:
        found: dict[tuple[int, int], int] = self.tree.find_matches(self._local(prompt, block_size)).scores
        return found.get((WORKER, 0), 0)

    def _store(self, event: dict[str, Any]) -> None:
        tokens = self._local(event["token_ids"], event["block_size"])
        parent = event["parent_block_hash"]
        for block_hash, token_hash in zip(event["block_hashes"], tokens, strict=True):
            self._copies[block_hash] += 1
            if self._copies[block_hash] == 1:
                block = {"block_hash": block_hash & U64, "tokens_hash": token_hash}
                self._send({"stored": {"parent_hash": parent, "blocks": [block]}})
                self._parents[block_hash] = parent
                if parent is not None:
                    self._children[parent] += 1
            parent = block_hash

    def _remove(self, event: dict[str, Any]) -> None:
        for block_hash in event["block_hashes"]:
            self._copies[block_hash] -= 1
            if self._copies[block_hash]:
                continue
            self.num_early_removals += self._children[block_hash] > 0
            parent = self._parents.pop(block_hash)
            if parent is not None:
                self._children[parent] -= 1
            self._send({"removed": {"block_hashes": [block_hash & U64]}})

    def _send(self, data: Any) -> None:
        self._event_id += 1
        message = {"event_id": self._event_id, "dp_rank": 0, "data": data}
        self.tree.apply_event(WORKER, json.dumps(message).encode())


async def test_dynamos_radix_tree_finds_what_our_lookup_finds() -> None:
    dynamo = pytest.importorskip("dynamo.llm", reason="NVIDIA Dynamo's wheel is for Linux")
    rng = seeded()
    async with fed_publisher(rng, num_blocks=300) as (publisher, feeder):
        sockets = publisher.app.sockets
        assert sockets is not None
        radix = RadixFeeder(dynamo)
        captured: list[bytes] = []
        socket = publisher.subscriber("kv@")
        await asyncio.sleep(0.3)  # until the subscription has arrived; nobody tells
        workload = feeder.workload
        for _ in range(6):
            await feed(feeder, 40)
            await published(publisher, feeder)
            last = await until_captured(socket, captured, lambda: publisher_last(publisher))
            assert last == publisher_last(publisher)
            for payload in captured:
                for event in msgspec.msgpack.decode(payload)[1]:
                    radix.apply(event)
            captured.clear()
            compare(radix, workload, rng)
        assert radix.num_early_removals == 0, "our order removes a parent before its child"


def publisher_last(publisher: Any) -> int:
    return int(publisher.app.sockets.stream.next_sequence) - 1


async def until_captured(socket: Any, captured: list[bytes], last: Any) -> int:
    """Reads live batches up to the publisher's last one."""
    sequence = -1
    async with asyncio.timeout(20):
        while True:
            await asyncio.sleep(0)
            if socket.poll(50):
                _, number, payload = socket.recv_multipart()
                sequence = int.from_bytes(number, "big")
                captured.append(payload)
            elif sequence == last():
                return sequence


def compare(radix: RadixFeeder, workload: CacheWorkload, rng: random.Random) -> None:
    num_hits = 0
    for _ in range(200):
        prompt = workload.prompt()
        cut = rng.choice([len(prompt), rng.randint(1, len(prompt))])
        request = workload.request(prompt[:cut])
        # The manager leaves at least the last token to compute; the index does not know of that.
        ours = workload.manager.lookup(request).num_tokens // workload.block_size
        usable = (cut - 1) // workload.block_size
        theirs = min(radix.scores(prompt[:cut], workload.block_size), usable)
        assert theirs == ours
        num_hits += ours > 0
    assert num_hits > 20
