"""Requests for `bench kv-cache`, and how a cache serves them."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path

from reprise_cli.bench.multi_turn import make_multi_turn
from reprise_cli.bench.plain_kv_cache import PlainKVCache
from reprise_core.extra_keys import LoraAdapter
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.hash_chain import BlockHasher, HashChain
from reprise_core.ids import BlockHash, RequestId
from reprise_core.none_hash import none_hash
from reprise_scheduler.kv_cache.manager import KVCacheManager

BLOCK_SIZE = 16
PROMPT_BLOCKS = 200
"""Blocks of an `unlike_prompts` prompt."""

ALIVE = 8  # Requests that hold blocks at a time in the whole load.
MOONCAKE_BLOCK = 512


@dataclass
class BenchRequest:
    """A request with its hashes at hand; the chain makes those of the answer."""

    request_id: RequestId
    token_ids: list[int] | range
    num_prompt_tokens: int
    block_hashes: list[BlockHash]
    skip_lookup: bool = False
    report_full: bool = False
    num_preemptions: int = 0
    lora: LoraAdapter | None = None
    cache_salt: str | None = None
    junction_tokens: int = 0
    tenant: str = ""
    chain: HashChain | None = None
    answer: Sequence[int] = ()


def make_hasher() -> BlockHasher:
    algorithm = HashAlgorithm.SHA256_CBOR
    return BlockHasher(algorithm=algorithm, block_size=BLOCK_SIZE, none_hash=none_hash(algorithm, "bench"))


def multi_turn_requests() -> Iterator[BenchRequest]:
    hasher = make_hasher()
    for number, (prompt, answer) in enumerate(make_multi_turn()):
        chain = hasher.chain()
        chain.append(prompt)
        yield BenchRequest(
            RequestId(str(number)), prompt, len(prompt), chain.hashes, chain=chain, answer=answer
        )


def mooncake_requests(path: Path, count: int) -> Iterator[BenchRequest]:
    """Each id becomes 32 blocks of 16 tokens; ids name prefixes, so their digests do too."""
    digests: dict[int, list[BlockHash]] = {}
    per_id = MOONCAKE_BLOCK // BLOCK_SIZE
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(islice(lines, count)):
            request = json.loads(line)
            hashes: list[BlockHash] = []
            for block_id in request["hash_ids"]:
                if block_id not in digests:
                    digests[block_id] = [
                        BlockHash(sha256(b"%d/%d" % (block_id, i)).digest()) for i in range(per_id)
                    ]
                hashes += digests[block_id]
            num_tokens = request["input_length"]
            del hashes[num_tokens // BLOCK_SIZE :]
            yield BenchRequest(RequestId(str(number)), range(num_tokens), num_tokens, hashes)


def unlike_prompts(name: str, count: int) -> Iterator[BenchRequest]:
    num_tokens = PROMPT_BLOCKS * BLOCK_SIZE
    for number in range(count):
        request_id = f"{name}/{number}"
        hashes = [
            BlockHash(sha256(f"{request_id}/{place}".encode()).digest()) for place in range(PROMPT_BLOCKS)
        ]
        yield BenchRequest(RequestId(request_id), range(num_tokens), num_tokens, hashes)


def serve(manager: KVCacheManager, load: Sequence[BenchRequest]) -> int:
    """Looks up, allocates the rest of the prompt in one call, frees; returns the new blocks."""
    num_new_blocks = 0
    for request in load:
        hit = manager.lookup(request)
        num_new = request.num_prompt_tokens - hit.num_tokens
        new_blocks = manager.allocate(request, num_new, num_computed_tokens=0, hit=hit)
        if new_blocks is not None:
            num_new_blocks += len(new_blocks[0])
            manager.free(request)
    return num_new_blocks


def serve_plain(cache: PlainKVCache, load: Sequence[BenchRequest]) -> int:
    num_new_blocks = 0
    for request in load:
        hit, num_hit = cache.lookup(request)
        num_new = request.num_prompt_tokens - num_hit
        new_blocks = cache.allocate(request, num_new, num_computed_tokens=0, hit=hit, num_hit_tokens=num_hit)
        if new_blocks is not None:
            num_new_blocks += len(new_blocks[0])
            cache.free(request)
    return num_new_blocks


def whole_load(manager: KVCacheManager, load: Sequence[BenchRequest]) -> None:
    waiting = iter(load)
    alive = deque(islice(waiting, ALIVE))
    for request in alive:
        _admit(manager, request)
    while alive:
        request = alive.popleft()
        _answer(manager, request)
        manager.free(request)
        for following in islice(waiting, 1):
            _admit(manager, following)
            alive.append(following)


def _admit(manager: KVCacheManager, request: BenchRequest) -> None:
    hit = manager.lookup(request)
    num_new = request.num_prompt_tokens - hit.num_tokens
    manager.allocate(request, num_new, num_computed_tokens=0, hit=hit, is_admission=True)
    manager.record_admission(request, hit.num_tokens)


def _answer(manager: KVCacheManager, request: BenchRequest) -> None:
    chain, token_ids = request.chain, request.token_ids
    assert chain is not None
    assert isinstance(token_ids, list)
    for token in request.answer:
        num_computed = len(token_ids)
        manager.allocate(request, 1, num_computed_tokens=num_computed)
        token_ids.append(token)
        chain.append((token,))
