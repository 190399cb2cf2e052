"""A reader of SubscribeKvEvents that does what smg's gateway was seen to do, for the worst as well.

Its index is of one worker. Cursors are per rank; repeats are passed over; a gap, an end and an error make
it subscribe again from the last number applied; what cannot be replayed is a gap it lives with; a
snapshot replaces all; a lower first batch clears.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

import grpc
from smg_grpc_proto.generated import common_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

METADATA_TIMEOUT_S = 2.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 5.0
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 64 * 1024), ("grpc.http2.bdp_probe", 0))
"""So that a reader who stops is noticed soon."""

Key = bytes
"""Digest of a chain of blocks by their tokens, which is what prompts are matched with."""


class SmgLikeIndex:
    """Per hash how many stores it had, and the content key under which prompts find it."""

    def __init__(self) -> None:
        self.copies: Counter[int] = Counter()
        self.keys: dict[int, Key] = {}
        self.problems: list[str] = []
        """What loses or forges entries and must never come from us."""

    def clear(self) -> None:
        self.copies.clear()
        self.keys.clear()

    def apply(self, event: pb.KvCacheEvent) -> None:
        kind = event.WhichOneof("data")
        if kind == "cleared":
            self.clear()
        elif kind == "stored":
            self._store(event.stored)
        elif kind == "removed":
            for block_hash in event.removed.block_hashes:
                self._remove(block_hash)

    @property
    def found(self) -> Counter[Key]:
        """How many copies of each chain a prompt would meet."""
        return Counter({self.keys[block_hash]: count for block_hash, count in self.copies.items()})

    def _store(self, stored: pb.KvBlocksStored) -> None:
        if stored.tier in (pb.KV_CACHE_TIER_DISK, pb.KV_CACHE_TIER_EXTERNAL):
            return
        parent: Key = b""
        if stored.HasField("parent_block_hash"):
            parent = self.keys.get(stored.parent_block_hash, b"")
            if not parent:
                self.problems.append(f"unknown parent {stored.parent_block_hash}: filed as a chain's start")
        for block in stored.blocks:
            if len(block.token_ids) < block.block_size or not block.block_size:
                self.problems.append(f"block {block.block_hash} without tokens: what was known of it is lost")
                self.copies.pop(block.block_hash, None)
                self.keys.pop(block.block_hash, None)
                return
            parent = content_key(parent, block.token_ids, stored.lora_name, stored.cache_salt)
            self.keys[block.block_hash] = parent
            self.copies[block.block_hash] += 1

    def _remove(self, block_hash: int) -> None:
        if block_hash not in self.copies:
            return
        self.copies[block_hash] -= 1
        if not self.copies[block_hash]:
            del self.copies[block_hash], self.keys[block_hash]


def content_key(parent: Key, token_ids: Iterable[int], lora_name: str = "", salt: str = "") -> Key:
    text = repr((parent, list(token_ids), lora_name, salt))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class SmgLikeClient:
    """`run` until cancelled, or until the server says UNIMPLEMENTED. Clear `reading` to stop taking
    messages off the stream."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.index = SmgLikeIndex()
        self.cursors: dict[int, int] = {}
        self.reading = asyncio.Event()
        self.reading.set()
        self.num_snapshots = 0
        self.num_clears = 0
        self.num_gaps_accepted = 0
        self.num_calls = 0
        self.late_metadata = 0
        self.final: grpc.StatusCode | None = None
        self.applied = asyncio.Condition()
        self.partly_known = False
        self._gap_at: int | None = None

    async def run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while self.final is None:
            if await self._subscribe():
                backoff_s = FIRST_BACKOFF_S
            else:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """`condition` is looked at after every batch."""
        async with asyncio.timeout(timeout_s), self.applied:
            await self.applied.wait_for(condition)

    async def _subscribe(self) -> bool:
        """Whether anything came."""
        self.num_calls += 1
        came = False
        async with grpc.aio.insecure_channel(self._address, options=SMALL_WINDOW) as channel:
            start = self.cursors.get(0, 0)
            call = VllmEngineStub(channel).SubscribeKvEvents(
                pb.SubscribeKvEventsRequest(start_sequence_number=start)
            )
            try:
                async with asyncio.timeout(METADATA_TIMEOUT_S):
                    await call.initial_metadata()
            except TimeoutError:
                self.late_metadata += 1
                call.cancel()
                return False
            with suppress(grpc.aio.AioRpcError):
                fresh: set[int] = set()
                async for batch in call:
                    came = True
                    if not await self._take(batch, fresh):
                        call.cancel()
                        return True
                    await self.reading.wait()
            if await call.code() is grpc.StatusCode.UNIMPLEMENTED:
                self.final = grpc.StatusCode.UNIMPLEMENTED
        return came

    async def _take(self, batch: pb.KvEventBatch, seen_ranks: set[int]) -> bool:
        """False for a gap that is worth another try."""
        rank, number = batch.dp_rank, batch.sequence_number
        last = self.cursors.get(rank)
        is_first = rank not in seen_ranks
        seen_ranks.add(rank)
        if batch.HasField("snapshot"):
            if batch.snapshot.index == 0:
                self.num_snapshots += 1
                self.index.clear()
                self.partly_known = batch.snapshot.unknown_before > 0
        elif last is not None and number <= last:
            if not is_first or number == last:
                return True
            self.num_clears += 1
            self.index.clear()
        elif last is not None and number > last + 1:
            if self._gap_at != number:
                self._gap_at = number
                return False
            self.num_gaps_accepted += 1
        async with self.applied:
            for event in batch.events:
                self.index.apply(event)
            self.cursors[rank] = number
            self.applied.notify_all()
        return True
