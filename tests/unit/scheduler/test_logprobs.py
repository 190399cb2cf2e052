"""Log-probabilities through the scheduler: whole, once, and the same whatever is cached or preempted."""

import random
from typing import Any

import pytest

from reprise_core.requests import SamplingParams
from reprise_core.steps import StepPlan
from reprise_scheduler.sched import scheduler as scheduler_module
from reprise_scheduler.sched.draft import Draft
from support.sched_driver import Driver
from support.sim_worker import expected_logprobs, expected_output

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
LONGER = [*PROMPT, 21, 22, 23, 24, 25, 26]


def asking(max_tokens: int = 4, **asked: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **asked)


def check(driver: Driver, name: str, prompt: list[int], sampling: SamplingParams) -> None:
    output = expected_output(prompt, sampling.max_tokens)
    assert driver.outputs[name] == output
    if sampling.logprobs is not None:
        rows = expected_logprobs([*prompt, *output], len(prompt), sampling.logprobs)
        assert driver.logprobs[name] == rows
    if sampling.prompt_logprobs is not None:
        assert driver.prompt_logprobs[name] == [expected_logprobs(prompt, 1, sampling.prompt_logprobs)]


def run_ahead(driver: Driver, max_steps: int = 20_000) -> None:
    """As many plans in flight as there may be; results come late."""
    in_flight: list[StepPlan] = []
    for _ in range(max_steps):
        while (plan := driver.plan()) is not None:
            in_flight.append(plan)
        if not in_flight:
            assert not driver.scheduler.unfinished()
            return
        driver.execute(in_flight.pop(0))
    raise AssertionError("no end")


def test_only_those_who_ask_are_told() -> None:
    driver = Driver()
    request = driver.add("plain", PROMPT)
    driver.add("asking", LONGER, sampling=asking(logprobs=3))
    driver.run()
    assert (driver.logprobs["plain"], request.logprobs, driver.prompt_logprobs) == (b"", None, {})
    check(driver, "asking", LONGER, asking(logprobs=3))


@pytest.mark.parametrize("order", [("short", "long"), ("long", "short")])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_k4_overlapping_prompts_have_equal_values_in_both_orders(
    order: tuple[str, str], async_scheduling: bool
) -> None:
    """They read nothing from the cache, and what they compute can be hit by who comes later."""
    prompts = {"short": PROMPT, "long": LONGER}
    driver = Driver(async_scheduling=async_scheduling)
    manager = driver.scheduler.manager
    for name in order:
        request = driver.add(name, prompts[name], sampling=asking(prompt_logprobs=2))
        run_ahead(driver)
        assert request.prompt_sources.cached == 0
        check(driver, name, prompts[name], asking(prompt_logprobs=2))
    assert manager.take_stats().queries == 0
    later = driver.add("later", [*LONGER, 30])
    run_ahead(driver)
    assert later.prompt_sources.device == len(LONGER)
    assert driver.outputs["later"] == expected_output([*LONGER, 30], 4)


def test_the_store_is_not_asked_and_yet_given_what_was_computed() -> None:
    driver = Driver(connector=True)
    driver.scheduler.connector.set_generation(driver.store.generation)
    driver.add("measured", LONGER, sampling=asking(prompt_logprobs=0))
    assert not driver.scheduler.connector.looking_up
    driver.run()
    driver.step()
    assert driver.scheduler.counters.external_queried_tokens == 0
    assert len(driver.store.blocks) >= len(LONGER) // 4
    driver.scheduler.reset_prefix_cache(preempt_running=False)
    again = driver.add("again", LONGER, sampling=asking(prompt_logprobs=0))
    driver.run()
    assert again.prompt_sources.cached == 0
    check(driver, "again", LONGER, asking(prompt_logprobs=0))


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("budget", [3, 16, 512])
def test_a_small_pool_preempts_and_nothing_is_told_twice_or_changed(
    async_scheduling: bool, budget: int
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    driver = Driver(num_blocks=14, max_num_batched_tokens=budget, async_scheduling=async_scheduling)
    requests: dict[str, tuple[list[int], SamplingParams]] = {}
    for index in range(24):
        prompt = LONGER[: chance.randint(2, len(LONGER))]
        asked = {
            name: chance.randint(0, 3) for name in ("logprobs", "prompt_logprobs") if chance.random() < 0.7
        }
        requests[f"r{index}"] = (prompt, asking(chance.randint(1, 24), **asked))
    for name, (prompt, sampling) in requests.items():
        driver.add(name, prompt, sampling=sampling)
    run_ahead(driver)
    assert driver.scheduler.counters.preemptions > 0
    for name, (prompt, sampling) in requests.items():
        check(driver, name, prompt, sampling)


def test_a_request_preempted_within_its_prompt_keeps_what_was_known() -> None:
    driver = Driver(max_num_batched_tokens=5)
    sampling = asking(prompt_logprobs=1)
    request = driver.add("a", LONGER, sampling=sampling)
    driver.step()
    known = bytes(request.logprobs.prompt)
    assert known == expected_logprobs(LONGER[:6], 1, 1)
    assert driver.scheduler.reset_prefix_cache(preempt_running=True)
    assert request.skip_lookup
    driver.step()
    assert request.logprobs.prompt == known
    driver.run()
    check(driver, "a", LONGER, sampling)


def test_once_it_has_a_token_a_preempted_request_may_use_the_cache_again() -> None:
    driver = Driver()
    request = driver.add("a", LONGER, max_tokens=4, sampling=asking(prompt_logprobs=1))
    driver.step()
    driver.scheduler._planner.preempt(None, request)
    plan = driver.step()
    assert plan.added[0].num_computed_tokens == len(LONGER)
    assert plan.added[0].sampling.num_prompt_logprobs is None
    driver.run()
    check(driver, "a", LONGER, asking(prompt_logprobs=1))


def test_a_lost_worker_changes_nothing_of_what_is_told() -> None:
    driver = Driver(max_num_batched_tokens=7)
    sampling = asking(6, logprobs=1, prompt_logprobs=1)
    driver.add("a", LONGER, sampling=sampling)
    for _ in range(4):
        driver.step()
    driver.worker.requests.clear()
    driver.scheduler.lose_worker()
    driver.run()
    check(driver, "a", LONGER, sampling)


def test_positions_to_measure_have_a_limit_in_each_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def draft(**values: Any) -> Draft:
        return Draft(prompt_positions=6, **values)

    monkeypatch.setattr(scheduler_module, "Draft", draft)
    driver = Driver()
    driver.add("a", PROMPT, sampling=asking(prompt_logprobs=0))
    driver.add("b", PROMPT[::-1], sampling=asking(prompt_logprobs=0))
    assert [item.num_new_tokens for item in driver.step().scheduled] == [6]
    driver.add("plain", [40] * 9)  # behind b, which gets no place in the first plan
    assert [item.num_new_tokens for item in driver.step().scheduled] == [4, 2, 9]
    assert [item.num_new_tokens for item in driver.step().scheduled] == [1, 6, 1]
    assert [item.num_new_tokens for item in driver.step().scheduled] == [1, 2, 1]
    driver.run()
    check(driver, "a", PROMPT, asking(prompt_logprobs=0))
    check(driver, "b", PROMPT[::-1], asking(prompt_logprobs=0))
