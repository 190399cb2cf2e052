"""A KV cache manager under a random load, as a source of KV events with a truth to compare with."""

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from reprise_core.extra_keys import LoraAdapter
from reprise_core.hash_algorithms import HashAlgorithm, external_hash
from reprise_core.hash_chain import BlockHasher
from reprise_core.ids import BlockHash, RequestId
from reprise_core.kv_events import BlockRemoved, BlockStored, KvEvent
from reprise_core.none_hash import none_hash
from reprise_scheduler.kv_cache.config import GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager

SEED_TEXT = "workload"
Truth = Counter[tuple[int, int, str]]
"""Copies by (hash, group, medium)."""


@dataclass
class PlainRequest:
    request_id: RequestId
    token_ids: Sequence[int]
    block_hashes: Sequence[BlockHash]
    skip_lookup: bool = False
    report_full: bool = False
    num_preemptions: int = 0
    lora: LoraAdapter | None = None
    cache_salt: str | None = None
    tenant: str = ""
    junction_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)


@dataclass
class CacheWorkload:
    """Prompts are paths in a tree of shared pieces, so that prefixes repeat; requests run beside each other
    and end in any order. `host_blocks` above 0 adds a model of a host tier below the device."""

    rng: random.Random
    num_blocks: int = 400
    block_size: int = 16
    host_blocks: int = 0
    branching: int = 4
    manager: KVCacheManager = field(init=False)
    hasher: BlockHasher = field(init=False)

    def __post_init__(self) -> None:
        config = KVCacheConfig(num_blocks=self.num_blocks, groups=(GroupSpec(block_size=self.block_size),))
        self.manager = KVCacheManager(config, enable_events=True)
        algorithm = HashAlgorithm.XXHASH_CBOR
        self.hasher = BlockHasher(
            algorithm=algorithm, block_size=self.block_size, none_hash=none_hash(algorithm, SEED_TEXT)
        )
        self._running: deque[PlainRequest] = deque()
        self._number = 0
        self._host: deque[int] = deque()
        self._known: dict[tuple[int, ...], tuple[list[int], list[BlockHash]]] = {}

    def prompt(self) -> list[int]:
        token_ids, _ = self._known_prompt(self._draw_path())
        return list(token_ids)

    def request(self, token_ids: list[int]) -> PlainRequest:
        return self._numbered(token_ids, self._hashes(token_ids))

    def step(self, *, num_requests: int = 4) -> list[KvEvent]:
        """Some requests come and go; the events of that."""
        for _ in range(num_requests):
            self._admit(self._numbered(*self._known_prompt(self._draw_path())))
        while self._running and self.rng.random() < 0.6:
            self._finish(self.rng.randrange(len(self._running)))
        events = self.manager.take_events()
        return events + self._host_events(events)

    def reset(self) -> list[KvEvent]:
        """Everything goes, on both tiers."""
        while self._running:
            self._finish(0)
        assert self.manager.reset()
        self._host.clear()
        return self.manager.take_events()

    def _draw_path(self) -> tuple[int, ...]:
        return tuple(self.rng.randrange(self.branching) for _ in range(self.rng.randint(1, 5)))

    def _known_prompt(self, path: tuple[int, ...]) -> tuple[list[int], list[BlockHash]]:
        """Tokens and block hashes, made once: making them costs more than all the rest of a step."""
        known = self._known.get(path)
        if known is None:
            token_ids: list[int] = []
            number = 0
            for branch in path:
                number = number * self.branching + branch
                piece = random.Random(number)
                num_tokens = piece.randint(self.block_size, 5 * self.block_size)
                token_ids += [piece.randrange(50_000) for _ in range(num_tokens)]
            known = self._known[path] = token_ids, self._hashes(token_ids)
        return known

    def _hashes(self, token_ids: list[int]) -> list[BlockHash]:
        chain = self.hasher.chain()
        chain.append(token_ids)
        return chain.hashes

    def _numbered(self, token_ids: list[int], block_hashes: list[BlockHash]) -> PlainRequest:
        self._number += 1
        return PlainRequest(RequestId(f"r{self._number}"), token_ids, block_hashes)

    def _admit(self, request: PlainRequest) -> None:
        while True:
            hit = self.manager.lookup(request)
            num_new = len(request.token_ids) - hit.num_tokens
            if self.manager.allocate(request, num_new, num_computed_tokens=0, hit=hit) is not None:
                self._running.append(request)
                return
            if not self._running:
                return
            self._finish(0)

    def _finish(self, index: int) -> None:
        self.manager.free(self._running[index])
        del self._running[index]

    def _host_events(self, events: Sequence[KvEvent]) -> list[KvEvent]:
        """Some of what the device stored is copied down, often without its tokens; the oldest copies go."""
        if not self.host_blocks:
            return []
        made: list[KvEvent] = []
        for event in events:
            if isinstance(event, BlockStored) and self.rng.random() < 0.5:
                bare = self.rng.random() < 0.5
                made.append(_on_host(event, bare=bare))
                self._host.extend(int(block_hash) for block_hash in event.block_hashes)
        while len(self._host) > self.host_blocks:
            number = min(len(self._host), self.rng.randint(1, 8))
            gone = tuple(self._host.popleft() for _ in range(number))
            made.append(BlockRemoved(block_hashes=gone, medium="CPU", group_idx=0))
        return made

    def truth(self) -> Truth:
        index = self.manager._pool.indexes[0]
        counts: Truth = Counter()
        for block_hash in index.first:
            counts[external_hash(block_hash), 0, "GPU"] += len(list(index.holders(block_hash)))
        counts.update((block_hash, 0, "CPU") for block_hash in self._host)
        return counts


def _on_host(event: BlockStored, *, bare: bool) -> BlockStored:
    return BlockStored(
        block_hashes=event.block_hashes,
        parent_block_hash=event.parent_block_hash,
        token_ids=() if bare else event.token_ids,
        block_size=event.block_size,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        group_idx=event.group_idx,
    )
