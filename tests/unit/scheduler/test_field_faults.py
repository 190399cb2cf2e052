"""Faults that schedulers elsewhere have had, under the names they were collected by.

K4 (prompt log-probabilities over cached positions) is in test_logprobs.py.
"""

import pytest

from reprise_core.requests import FinishReason
from support.sched_driver import Driver
from support.sim_worker import expected_output

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def run_ahead(driver: Driver, max_steps: int = 20_000) -> None:
    """As many plans in flight as there may be; results come late."""
    in_flight = []
    for _ in range(max_steps):
        while (plan := driver.plan()) is not None:
            in_flight.append(plan)
        if not in_flight:
            assert not driver.scheduler.unfinished()
            return
        driver.execute(in_flight.pop(0))
    raise AssertionError("no end")


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_k1_preempted_requests_that_hit_their_own_old_blocks_give_the_same_tokens(
    async_scheduling: bool,
) -> None:
    prompts = {f"r{i}": [4 + i % 40, 4 + i // 40, *PROMPT[: i % 9]] for i in range(256)}
    outputs = []
    for num_blocks in (40, 4000):
        driver = Driver(
            num_blocks=num_blocks, max_num_seqs=256, max_num_waiting=300, async_scheduling=async_scheduling
        )
        for name, prompt in prompts.items():
            driver.add(name, prompt, max_tokens=16)
        run_ahead(driver)
        outputs.append(driver.outputs)
        preempted = driver.scheduler.counters.preemptions
        assert preempted > 50 if num_blocks == 40 else preempted == 0
    assert driver.scheduler.manager.usage == 0
    assert outputs[0] == outputs[1]
    assert outputs[0]["r7"] == expected_output(prompts["r7"], 16)


def test_k2_a_full_cache_with_plan_ahead_goes_on_and_preempts_each_request_a_few_times() -> None:
    driver = Driver(num_blocks=48, max_num_seqs=120, max_num_waiting=120, async_scheduling=True)
    requests = [driver.add(f"r{i}", [4 + i % 40, *PROMPT], max_tokens=30) for i in range(120)]
    in_flight = []
    progress = [0]
    while driver.scheduler.unfinished():
        for _ in range(100):
            while (plan := driver.plan()) is not None:
                in_flight.append(plan)
            if in_flight:
                driver.execute(in_flight.pop(0))
        progress.append(sum(map(len, driver.outputs.values())))
        assert progress[-1] > progress[-2], "100 steps without a token"
    assert driver.scheduler.counters.preemptions > 0
    assert max(request.num_preemptions for request in requests) <= 12
    assert all(len(tokens) == 30 for tokens in driver.outputs.values())


def test_k3_blocks_given_back_unfilled_are_not_found_as_cached() -> None:
    for num_steps in (0, 1):
        driver = Driver(max_num_batched_tokens=4, async_scheduling=True)
        request = driver.add("cancelled", PROMPT)
        for _ in range(num_steps):
            driver.execute(driver.plan())
        driver.scheduler.finish(request, FinishReason.ABORT)
        again = driver.add("again", PROMPT)
        driver.run()
        assert again.prompt_sources is not None
        assert again.prompt_sources.device == 4 * num_steps  # what was computed, and nothing more
        assert driver.outputs["again"] == expected_output(PROMPT, 4)


def test_k3_preempted_within_the_plan_that_was_to_fill_them_they_are_not_found_either() -> None:
    driver = Driver(num_blocks=8, async_scheduling=True)
    driver.add("a", PROMPT, max_tokens=14)
    driver.add("b", PROMPT[::-1], max_tokens=14)
    driver.add("c", PROMPT[::-1], max_tokens=14)
    run_ahead(driver)  # the simulated worker checks every slot that is read
    assert driver.scheduler.counters.preemptions > 0
    assert driver.outputs["b"] == driver.outputs["c"] == expected_output(PROMPT[::-1], 14)
