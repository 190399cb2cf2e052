"""The worker's log-probabilities are those of transformers alone, whatever the plans and the batches."""

import random

import msgspec
import pytest
import torch

from reprise_core.logprobs import unpack_rows
from reprise_core.steps import AddedRequest, StepPlan, WorkerSampling, pack_ids
from reprise_worker import logprobs
from reprise_worker.model import PagedModel
from reprise_worker.runner import BadPlan
from support.plain_logprobs import check_rows, plain_scores
from support.runner_driver import GREEDY, Driver
from support.tiny_models import paged, small_config, small_model

TOLERANCE = 2e-3
"""Nats. Paged and plain attention round differently; logits of these models are within about +-30."""


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return paged(small_model(small_config("Llama")))


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=length)


def asking(**asked: int) -> WorkerSampling:
    """Greedy, or what `asked` says."""
    return msgspec.structs.replace(GREEDY, **asked)


def check(driver: Driver, handle: int) -> None:
    """All that the request asked for, and nothing else."""
    tokens, num_prompt = driver.tokens[handle], driver.num_prompt[handle]
    sampling = driver.sampling[handle]
    scores = plain_scores(driver.model, tokens)
    if sampling.num_logprobs is None:
        assert not driver.logprobs.get(handle)
    else:
        output = driver.output(handle)
        rows = driver.logprobs[handle]
        check_rows(rows, sampling.num_logprobs, output, scores[num_prompt - 1 : -1], tolerance=TOLERANCE)
    if sampling.num_prompt_logprobs is None:
        assert not driver.prompt_logprobs.get(handle)
    else:
        rows = driver.prompt_logprobs[handle]
        of_prompt = (tokens[1:num_prompt], scores[: num_prompt - 1])
        check_rows(rows, sampling.num_prompt_logprobs, *of_prompt, tolerance=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 3, 8, 23])
def test_of_a_prompt_in_chunks_and_of_what_follows(model: PagedModel, chunk: int) -> None:
    driver = Driver(model)
    driver.add(1, prompt_of(23), sampling=asking(num_logprobs=5, num_prompt_logprobs=3))
    while driver.remaining(1) > chunk:
        driver.step({1: chunk})
    driver.finish([1], 6)
    check(driver, 1)


def test_requests_that_ask_for_different_things_in_the_same_steps(model: PagedModel) -> None:
    kinds = [
        {},
        {"num_logprobs": 0},
        {"num_logprobs": 20},
        {"num_prompt_logprobs": 0},
        {"num_prompt_logprobs": 20, "num_logprobs": 2},
        {"num_logprobs": 1, "temperature": 0.7, "top_k": 9, "seed": 4},
    ]
    driver = Driver(model, num_blocks=200)
    chance = random.Random(3)
    for handle, kind in enumerate(kinds * 2, start=1):
        driver.add(handle, prompt_of(2 + 2 * handle, seed=handle), sampling=asking(**kind))
        driver.step({one: min(driver.remaining(one), chance.choice([1, 4, 30])) for one in driver.tokens})
    driver.finish(list(driver.tokens), 5)
    for handle in driver.tokens:
        check(driver, handle)


def test_raw_values_of_a_draw_that_is_cut_and_banned(model: PagedModel) -> None:
    """Temperature, top_k and bans change what is drawn and nothing of what is told."""
    driver = Driver(model)
    driver.add(1, prompt_of(9), sampling=asking(num_logprobs=1))
    driver.finish([1], 1)
    banned = unpack_rows(driver.logprobs[1], 1)[0].top_ids[0]
    sampling = asking(
        num_logprobs=4, temperature=1.5, seed=8, min_tokens=9, banned_token_ids=pack_ids([banned])
    )
    driver.add(2, prompt_of(9), sampling=sampling)
    driver.finish([2], 6)
    check(driver, 2)
    first = unpack_rows(driver.logprobs[2], 4)[0]
    assert driver.output(2)[0] != banned
    assert first.top_ids[0] == banned
    assert first.rank > 1


def test_a_request_that_resumes_is_told_of_new_tokens_only(model: PagedModel) -> None:
    driver = Driver(model)
    driver.add(1, prompt_of(17), num_output=6, sampling=asking(num_logprobs=2))
    driver.step({1: 10})
    assert driver.logprobs == {}
    driver.finish([1], 9)
    rows = driver.logprobs[1]
    scores = plain_scores(model, driver.tokens[1])
    check_rows(rows, 2, driver.tokens[1][17:], scores[16:-1], tolerance=TOLERANCE)


def test_many_rows_are_measured_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(10, 31) * 4, list(range(10))
    whole = logprobs.measure(logits, tokens, 3).pack(0, 10, 3)
    monkeypatch.setattr(logprobs, "_ROWS_AT_ONCE", 4)
    assert logprobs.measure(logits, tokens, 3).pack(0, 10, 3) == whole
    check_rows(whole, 3, tokens, logits.log_softmax(-1), tolerance=1e-5)


def test_logits_of_half_precision_are_measured_in_float32() -> None:
    logits = (torch.randn(4, 3000, generator=torch.Generator().manual_seed(1)) * 5).bfloat16()
    rows = logprobs.measure(logits, [1, 2, 3, 4], 2).pack(0, 4, 2)
    check_rows(rows, 2, [1, 2, 3, 4], logits.float().log_softmax(-1), tolerance=1e-5)


@pytest.mark.parametrize("asked", [{"num_logprobs": 21}, {"num_prompt_logprobs": -1}])
def test_a_plan_that_wants_too_many_is_refused(model: PagedModel, asked: dict[str, int]) -> None:
    driver = Driver(model)
    added = AddedRequest(1, pack_ids([3, 4]), 2, 0, (pack_ids([1]),), asking(**asked))
    with pytest.raises(BadPlan, match="most probable tokens"):
        driver.runner.execute(StepPlan(1, added=(added,)))
