"""Whole-prompt hits with the real scheduler, the real runner and a small model in float32: same tokens."""

import random

import pytest
import torch

from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.hash_chain import BlockHasher
from reprise_core.ids import RequestId
from reprise_core.none_hash import none_hash
from reprise_core.requests import SamplingParams
from reprise_scheduler.kv_cache.config import GroupSpec, KVCacheConfig
from reprise_scheduler.sched.config import SchedulerConfig
from reprise_scheduler.sched.request import Request
from reprise_scheduler.sched.scheduler import Scheduler
from reprise_worker.attention import TorchAttention
from reprise_worker.kv_cache import KvCache
from reprise_worker.model import PagedModel
from reprise_worker.runner import Runner
from support.runner_driver import NoMover
from support.tiny_models import paged, plain_greedy, small_config, small_model

BLOCK_SIZE = 4
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def model() -> PagedModel:
    model = paged(small_model(small_config("Llama")))
    assert model.dtype is torch.float32
    return model


class Engine:
    def __init__(self, model: PagedModel, *, num_blocks: int, async_scheduling: bool) -> None:
        algorithm = HashAlgorithm.SHA256_CBOR
        self.hasher = BlockHasher(
            algorithm=algorithm, block_size=BLOCK_SIZE, none_hash=none_hash(algorithm, "test")
        )
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=32, async_scheduling=async_scheduling),
            KVCacheConfig(
                num_blocks=num_blocks, groups=(GroupSpec(block_size=BLOCK_SIZE),), full_prompt_hit=True
            ),
        )
        kv = KvCache(
            model.layers,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            dtype=model.dtype,
            device=torch.device("cpu"),
        )
        self.runner = Runner(model, kv, TorchAttention(), NoMover())
        self.outputs: dict[RequestId, list[int]] = {}
        self.num_copies = 0
        self._sequence = 0

    def add(self, prompt: list[int]) -> Request:
        self._sequence += 1
        chain = self.hasher.chain()
        chain.append(prompt)
        request = Request(
            request_id=RequestId(f"r{self._sequence}"),
            owner=None,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
            chain=chain,
            arrival_s=0.0,
            sequence=self._sequence,
        )
        self.outputs[request.request_id] = []
        self.scheduler.add(request)
        return request

    def run(self) -> None:
        """Plans as far ahead as the scheduler does; executes one after another."""
        plans = []
        while True:
            while (plan := self.scheduler.plan_step(now_s=0.0)) is not None:
                plans.append(plan)
                self.num_copies += len(plan.copies)
            if not plans:
                return
            for output in self.scheduler.apply_result(self.runner.execute(plans.pop(0)), now_s=0.0):
                self.outputs[output.request.request_id] += output.token_ids
            self.scheduler.manager.check_invariants()


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=length)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_one_token_is_computed_and_the_tokens_are_the_same(model: PagedModel, async_scheduling: bool) -> None:
    engine = Engine(model, num_blocks=40, async_scheduling=async_scheduling)
    prompt = prompt_of(5 * BLOCK_SIZE, seed=1)
    first = engine.add(prompt)
    engine.run()
    second = engine.add(prompt)
    engine.run()
    expected = plain_greedy(model, prompt, NUM_TOKENS)
    assert engine.outputs[first.request_id] == engine.outputs[second.request_id] == expected
    assert second.prompt_sources is not None
    assert second.prompt_sources.cached == len(prompt) - 1
    assert engine.num_copies == 1


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_block_that_the_same_step_fills_is_not_copied(model: PagedModel, async_scheduling: bool) -> None:
    """Copies are made before a step computes: the second request hits one block less."""
    engine = Engine(model, num_blocks=40, async_scheduling=async_scheduling)
    prompt = prompt_of(3 * BLOCK_SIZE, seed=2)
    requests = [engine.add(prompt) for _ in range(3)]
    engine.run()
    expected = plain_greedy(model, prompt, NUM_TOKENS)
    assert [engine.outputs[request.request_id] for request in requests] == [expected] * 3
    assert requests[1].prompt_sources is not None
    assert requests[1].prompt_sources.cached == 2 * BLOCK_SIZE


def test_on_a_short_pool_with_preemptions(model: PagedModel) -> None:
    engine = Engine(model, num_blocks=14, async_scheduling=True)
    prompts = [prompt_of(BLOCK_SIZE * (2 + seed), seed) for seed in range(3)]
    chance = random.Random(7)
    requests = []
    for _ in range(12):
        requests += [engine.add(chance.choice(prompts)) for _ in range(2)]
        engine.run()
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert engine.outputs[request.request_id] == plain_greedy(model, prompt, NUM_TOKENS)
    assert engine.num_copies > 0
