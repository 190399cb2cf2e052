"""Scheduler and worker with a small real model: log-probabilities are those of transformers alone.

Tolerance: 2e-3 nats in float32. Chunks and batches change how sums are rounded, and logits of these models
are within about +-30; a value of another position differs by whole nats.
"""

import random

import pytest
import torch

from reprise_core.requests import SamplingParams
from reprise_scheduler.sched.request import Request
from reprise_worker.attention import TorchAttention
from reprise_worker.kv_cache import KvCache
from reprise_worker.model import PagedModel
from reprise_worker.runner import Runner
from support.plain_logprobs import check_rows, plain_scores
from support.runner_driver import NoMover
from support.sched_driver import Driver
from support.tiny_models import paged, small_config, small_model

TOLERANCE = 2e-3
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return paged(small_model(small_config("Llama")))


class ModelDriver(Driver):
    """Plans are executed by the worker's own runner."""

    def __init__(self, model: PagedModel, *, num_blocks: int = 64, **config: object) -> None:
        super().__init__(num_blocks=num_blocks, block_size=BLOCK_SIZE, **config)
        kv = KvCache(
            model.layers,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            dtype=model.dtype,
            device=torch.device("cpu"),
        )
        # The simulated worker stays for the loads, of which there are none.
        self.worker.execute = Runner(model, kv, TorchAttention(), NoMover()).execute  # type: ignore[method-assign]
        self.model = model

    def ask(self, name: str, prompt: list[int], max_tokens: int = 5, **asked: int) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **asked)
        return self.add(name, prompt, sampling=sampling)

    def check(self, request: Request) -> None:
        name, sampling = str(request.request_id), request.sampling
        num_prompt = request.num_prompt_tokens
        scores = plain_scores(self.model, request.token_ids)
        assert len(self.outputs[name]) == sampling.max_tokens
        if sampling.logprobs is not None:
            of_output = (request.token_ids[num_prompt:], scores[num_prompt - 1 : -1])
            check_rows(self.logprobs[name], sampling.logprobs, *of_output, tolerance=TOLERANCE)
        if sampling.prompt_logprobs is not None:
            (rows,) = self.prompt_logprobs[name]
            of_prompt = (request.token_ids[1:num_prompt], scores[: num_prompt - 1])
            check_rows(rows, sampling.prompt_logprobs, *of_prompt, tolerance=TOLERANCE)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=length)


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 512},
        {"max_num_batched_tokens": 64, "enable_chunked_prefill": False},
        {"max_num_batched_tokens": 9, "async_scheduling": True},
    ],
    ids=lambda config: ",".join(f"{name}={value}" for name, value in config.items()),
)
def test_a_batch_in_which_everybody_asks_for_something_else(
    model: PagedModel, config: dict[str, object]
) -> None:
    driver = ModelDriver(model, **config)
    requests = [
        driver.ask("nothing", prompt_of(19, 1)),
        driver.ask("tokens", prompt_of(14, 2), logprobs=0),
        driver.ask("many", prompt_of(23, 3), logprobs=20, prompt_logprobs=20),
        driver.ask("prompt", prompt_of(30, 4), prompt_logprobs=1),
        driver.ask("short", prompt_of(1, 5), logprobs=2),
        driver.ask("one output", prompt_of(8, 6), max_tokens=1, logprobs=3, prompt_logprobs=0),
    ]
    driver.run()
    for request in requests:
        driver.check(request)
    assert driver.logprobs["nothing"] == b""


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_short_pool(model: PagedModel, async_scheduling: bool) -> None:
    driver = ModelDriver(model, num_blocks=16, max_num_batched_tokens=16, async_scheduling=async_scheduling)
    requests = [
        driver.ask(f"r{i}", prompt_of(6 + 3 * i, i), max_tokens=16, logprobs=1, prompt_logprobs=i % 3)
        for i in range(7)
    ]
    driver.run()
    assert driver.scheduler.counters.preemptions > 0
    for request in requests:
        driver.check(request)


@pytest.mark.parametrize("order", [("short", "long"), ("long", "short")])
def test_k4_overlapping_prompts_in_both_orders(model: PagedModel, order: tuple[str, str]) -> None:
    """Cached positions have no logits: who wants all of them reads nothing from the cache, but fills it."""
    shared = prompt_of(22)
    prompts = {"short": shared, "long": [*shared, *prompt_of(9, 7)]}
    driver = ModelDriver(model)
    driver.ask("warm", shared)
    driver.run()
    for name in order:
        request = driver.ask(name, prompts[name], prompt_logprobs=4, logprobs=1)
        driver.run()
        driver.check(request)
        assert request.prompt_sources is not None
        assert request.prompt_sources.cached == 0
    # The longer prompt's own blocks can be found: only its last, partial one is computed again.
    later = driver.ask("later", prompts["long"], logprobs=1)
    driver.run()
    driver.check(later)
    assert later.prompt_sources is not None
    assert later.prompt_sources.device == len(prompts["long"]) // BLOCK_SIZE * BLOCK_SIZE
    assert driver.outputs["later"] == driver.outputs["long"]
