"""Runs the reference (vLLM) on our benchmarks' work; executed by the Python of `.venv-peers`.

Reads one JSON object a line from standard input, writes one a line: {"seconds": .., "count": ..}, seconds
of processor time. Nothing of Reprise is imported but the workload, so it needs none of its packages.
"""

import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
BLOCK_SIZE = 16
ALIVE = 8


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # what the reference prints is no answer
    reference = Reference()
    works: dict[str, Callable[..., dict[str, Any]]] = {
        "hash": reference.hash_prompt,
        "kv-cache": reference.kv_cache,
        "version": reference.version,
    }
    answers.write(json.dumps({"version": reference.version_text}) + "\n")
    answers.flush()
    for line in sys.stdin:
        command = json.loads(line)
        work = works[command.pop("work")]
        answers.write(json.dumps(work(**command)) + "\n")
        answers.flush()


class Reference:
    def __init__(self) -> None:
        torch = import_module("torch")
        interface = import_module("vllm.v1.kv_cache_interface")
        self._utils: Any = import_module("vllm.v1.core.kv_cache_utils")
        self._hash_fn = import_module("vllm.utils.hashing").get_hash_fn_by_name
        self._request = import_module("vllm.v1.request").Request
        self._sampling = import_module("vllm.sampling_params").SamplingParams
        self._manager_class = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
        self._config, self._group = interface.KVCacheConfig, interface.KVCacheGroupSpec
        self._spec = interface.FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        self.version_text: str = import_module("vllm").__version__
        self._load: list[tuple[list[int], list[int]]] = []
        self._requests: list[Any] = []
        self._warm: Any = None

    def version(self) -> dict[str, Any]:
        return {"version": self.version_text}

    # -- hashing --------------------------------------------------------------------------------

    def hash_prompt(
        self, algorithm: str, none_hash: str, num_tokens: int, vocabulary: int, times: int
    ) -> dict[str, Any]:
        """The prompt is drawn as the caller draws its own; `last` is its last hash, to compare."""
        self._utils.NONE_HASH = bytes.fromhex(none_hash)
        hasher = self._utils.get_request_block_hasher(BLOCK_SIZE, self._hash_fn(algorithm))
        prompt = random.Random(num_tokens).choices(range(vocabulary), k=num_tokens)
        request = self._make_request("prompt", prompt, None)
        hashes = hasher(request)
        start = time.process_time()
        for _ in range(times):
            hasher(request)
        return {
            "seconds": time.process_time() - start,
            "count": times * num_tokens,
            "last": hashes[-1].hex(),
        }

    # -- the cache manager ------------------------------------------------------------------------

    def kv_cache(self, case: str, none_hash: str, large_pool: int, small_pool: int) -> dict[str, Any]:
        """One measured run of a case on the multi-turn workload."""
        self._utils.NONE_HASH = bytes.fromhex(none_hash)
        if not self._load:
            from reprise_cli.bench.multi_turn import make_multi_turn

            self._load = make_multi_turn()
            self._requests = list(self._make_requests())
            self._warm = self._manager(large_pool)
            self._serve(self._warm)
        if case == "look-up":
            return self._timed_lookup()
        if case == "whole load":
            return self._timed_whole_load(self._manager(large_pool))
        pool = large_pool if case == "allocate + free" else small_pool
        events = case == "events made"
        manager = self._manager(pool, events=events)
        start = time.process_time()
        num_blocks, num_events = self._serve(manager, events=events)
        return {"seconds": time.process_time() - start, "count": num_events if events else num_blocks}

    def _make_request(self, name: str, prompt: list[int], hasher: Any) -> Any:
        sampling = self._sampling(max_tokens=1 << 20)
        return self._request(name, prompt, sampling, None, block_hasher=hasher)

    def _make_requests(self) -> Iterator[Any]:
        hasher = self._utils.get_request_block_hasher(BLOCK_SIZE, self._hash_fn("sha256_cbor"))
        for number, (prompt, _) in enumerate(self._load):
            yield self._make_request(str(number), list(prompt), hasher)

    def _manager(self, num_blocks: int, *, events: bool = False) -> Any:
        config = self._config(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[self._group(layer_names=["layer"], kv_cache_spec=self._spec)],
        )
        return self._manager_class(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_kv_cache_events=events,
        )

    def _serve(self, manager: Any, *, events: bool = False) -> tuple[int, int]:
        """New blocks and events."""
        num_blocks = num_events = 0
        for request in self._requests:
            blocks, num_hit, *_ = manager.get_computed_blocks(request)
            new = manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, blocks)
            if new is not None:
                num_blocks += len(new.blocks[0])
                manager.free(request)
            if events:
                num_events += len(manager.take_events())
        return num_blocks, num_events

    def _timed_lookup(self) -> dict[str, Any]:
        num_tokens = 0
        start = time.process_time()
        for request in self._requests:
            num_tokens += self._warm.get_computed_blocks(request)[1]
        return {"seconds": time.process_time() - start, "count": num_tokens // BLOCK_SIZE}

    def _timed_whole_load(self, manager: Any) -> dict[str, Any]:
        fresh = list(zip(self._make_requests(), (answer for _, answer in self._load), strict=True))
        start = time.process_time()
        waiting = iter(fresh)
        alive = deque(islice(waiting, ALIVE))
        for request, _ in alive:
            _admit(manager, request)
        while alive:
            request, answer = alive.popleft()
            _answer(manager, request, answer)
            manager.free(request)
            for following in islice(waiting, 1):
                _admit(manager, following[0])
                alive.append(following)
        return {"seconds": time.process_time() - start, "count": len(fresh)}


def _admit(manager: Any, request: Any) -> None:
    blocks, num_hit, *_ = manager.get_computed_blocks(request)
    manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, blocks)


def _answer(manager: Any, request: Any, answer: list[int]) -> None:
    for token in answer:
        request.num_computed_tokens = request.num_tokens
        manager.allocate_slots(request, 1)
        request.append_output_token_ids(token)


if __name__ == "__main__":
    main()
