"""A KV cache manager on a random workload, and its side of a publisher's intake."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import zmq

from reprise_core.block_record import BlockRecord
from reprise_core.extra_keys import HashInputs
from reprise_core.hash_algorithms import HashAlgorithm, external_hash
from reprise_core.hash_chain import BlockHasher
from reprise_core.ids import BlockHash, BlockId, RequestId
from reprise_core.kv_events import (
    MEDIUM_HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExternalHash,
    KvEvent,
)
from reprise_core.none_hash import none_hash
from reprise_publisher.kv_event_proto import signed_hash
from reprise_scheduler.kv_cache.config import GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager
from reprise_wire.event_intake import RequestKind, parse_request
from support.publisher_harness import Scheduler
from support.smg_like_client import Key, content_key

BLOCK_SIZE = 4
MAX_ALIVE = 4
STATE_BLOCKS_PER_EVENT = 16


@dataclass
class EngineRequest:
    request_id: RequestId
    token_ids: list[int]
    block_hashes: list[BlockHash]
    cache_salt: str | None = None
    skip_lookup: bool = False
    report_full: bool = False
    num_preemptions: int = 0
    junction_tokens: int = 0
    tenant: str = ""
    lora: None = None
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)


class EventEngine:
    """`step` does something and offers a batch. `truth` is what the manager and the host tier hold, not
    what events said of it."""

    def __init__(
        self, context: zmq.Context, endpoint: str, rng: random.Random, num_blocks: int = 200
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._rng = rng
        self._num_blocks = num_blocks
        algorithm = HashAlgorithm.SHA256_CBOR
        self._hasher = BlockHasher(
            algorithm=algorithm, block_size=BLOCK_SIZE, none_hash=none_hash(algorithm, "test")
        )
        self._trunks = [[rng.randrange(1000) for _ in range(rng.randint(8, 60))] for _ in range(6)]
        self.uses_host = True
        self.content: dict[int, Key] = {}
        """Of every plain block there ever was, by its signed hash."""
        self._answering: asyncio.Task[None] | None = None
        self.restart()

    def restart(self) -> None:
        """Another scheduler process: an empty cache and another epoch."""
        if self._answering is not None:
            self._answering.cancel()
            self._answering = None
        self._manager = KVCacheManager(
            KVCacheConfig(num_blocks=self._num_blocks, groups=(GroupSpec(block_size=BLOCK_SIZE),)),
            enable_events=True,
        )
        self._record = BlockRecord(limit_blocks=100_000)
        self._host: dict[ExternalHash, ExternalHash | None] = {}
        """Blocks on the host with their parents, which are there too: only leaves go."""
        self._alive: list[EngineRequest] = []
        self._num_requests = 0
        self.scheduler = Scheduler(self._context, self._endpoint)

    @property
    def truth(self) -> Counter[int]:
        """Copies on device and host by signed hash."""
        held = Counter(
            signed_hash(external_hash(block_hash))
            for block in range(1, self._num_blocks)
            for block_hash, _ in self._manager.entries_of(BlockId(block))
        )
        return held + Counter(map(signed_hash, self._host))

    def true_keys(self, held: Counter[int]) -> dict[int, Key]:
        """The content of the plain ones."""
        return {block_hash: self.content[block_hash] for block_hash in held if block_hash in self.content}

    def step(self) -> None:
        draw = self._rng.random()
        if draw < 0.01:
            for request in self._alive:
                self._manager.free(request)
            self._alive.clear()
            assert self._manager.reset()
        elif len(self._alive) >= MAX_ALIVE:
            self._manager.free(self._alive.pop(self._rng.randrange(MAX_ALIVE)))
        self._admit()
        events = self._manager.take_events()
        events += self._host_events(events)
        self._offer(events)

    def lose_batch(self) -> None:
        """One that is numbered and never arrives."""
        offered = self.scheduler.offer_events
        self.scheduler.offer_events = lambda *events: self._skip_number()  # type: ignore[method-assign]
        self.step()
        self.scheduler.offer_events = offered  # type: ignore[method-assign]

    def answer_requests(self) -> None:
        """From now on as a scheduler does: hello, and the state when it is asked for."""
        self._answering = asyncio.ensure_future(self._answer())

    def close(self) -> None:
        if self._answering is not None:
            self._answering.cancel()

    def _skip_number(self) -> int:
        self.scheduler.sequence += 1
        return self.scheduler.sequence - 1

    def _admit(self) -> None:
        rng = self._rng
        trunk = rng.choice(self._trunks)
        tokens = trunk[: rng.randint(1, len(trunk))] + [
            rng.randrange(1000) for _ in range(rng.randint(0, 30))
        ]
        salt = rng.choice(("red", "blue")) if rng.random() < 0.2 else None
        chain = self._hasher.chain(HashInputs(cache_salt=salt))
        chain.append(tokens)
        self._num_requests += 1
        request = EngineRequest(RequestId(str(self._num_requests)), tokens, chain.hashes, salt)
        if salt is None:
            self._note_content(request)
        hit = self._manager.lookup(request)
        num_new = len(tokens) - hit.num_tokens
        if self._manager.allocate(request, num_new, num_computed_tokens=0, hit=hit) is not None:
            self._alive.append(request)

    def _note_content(self, request: EngineRequest) -> None:
        parent: Key = b""
        for index, block_hash in enumerate(request.block_hashes):
            tokens = request.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            parent = content_key(parent, tokens)
            self.content[signed_hash(external_hash(block_hash))] = parent

    def _host_events(self, events: list[KvEvent]) -> list[KvEvent]:
        """Copies of blocks just stored, told without their tokens or parent, and copies that go."""
        if any(isinstance(event, AllBlocksCleared) for event in events):
            self._host.clear()
            return []
        if not self.uses_host:
            return []
        host: list[KvEvent] = []
        for event in events:
            if not isinstance(event, BlockStored) or self._rng.random() < 0.5:
                continue
            parent = event.parent_block_hash
            copied = []
            for block_hash in event.block_hashes:
                if parent is not None and parent not in self._host:
                    break
                if block_hash not in self._host:
                    self._host[block_hash] = parent
                    copied.append(block_hash)
                parent = block_hash
            if copied:
                host.append(_bare_store(tuple(copied)))
        if len(self._host) > 60:
            gone = tuple(self._rng.sample(sorted(self._host.keys() - set(self._host.values())), 5))
            for block_hash in gone:
                del self._host[block_hash]
            host.append(BlockRemoved(block_hashes=gone, medium=MEDIUM_HOST, group_idx=0))
        return host

    def _offer(self, events: list[KvEvent]) -> None:
        for event in events:
            self._record.apply(event)
        self.scheduler.offer_events(*events)

    async def _answer(self) -> None:
        while True:
            self.scheduler.hello()
            await asyncio.sleep(0.05)
            while self.scheduler.socket.poll(0):
                request = parse_request(self.scheduler.socket.recv_multipart())
                if request.kind is RequestKind.WANT_STATE:
                    frozen = self._record.freeze()
                    states = [state.event for state in frozen.stores(STATE_BLOCKS_PER_EVENT)]
                    pieces = [tuple(states[at : at + 8]) for at in range(0, len(states), 8)] or [()]
                    self.scheduler.send_state(request.state_id, *pieces, num_blocks=frozen.num_blocks)


def _bare_store(block_hashes: tuple[ExternalHash, ...]) -> BlockStored:
    return BlockStored(
        block_hashes=block_hashes,
        parent_block_hash=None,
        token_ids=(),
        block_size=BLOCK_SIZE,
        lora_id=None,
        medium=MEDIUM_HOST,
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
