"""What a preempted request had computed comes back from the store, also what was then on its way there."""

import random

import pytest

from reprise_scheduler.sched.load_cost import LoadRule
from reprise_scheduler.sched.request import Request
from support.sched_driver import Driver
from support.sim_worker import expected_output

BLOCK, NUM_BLOCKS = 4, 20
FIRST, SECOND = ([random.Random(seed).randrange(4, 50) for _ in range(8 * BLOCK + 1)] for seed in (1, 2))
FIRST_TOKENS, SECOND_TOKENS = 40, 12
NUM_COMPUTED_BLOCKS = 9
"""Of the second request, when it is preempted."""


def preempted(driver: Driver) -> Request:
    """Both fit, until the first one needs another block; soon it has most of those of the second."""
    driver.scheduler.connector.set_generation(driver.store.generation)
    driver.worker.hold_saves = True
    driver.add("first", FIRST, FIRST_TOKENS)
    request = driver.add("second", SECOND, SECOND_TOKENS)
    while not request.num_preemptions:
        driver.step()
    while len(driver.outputs["first"]) < FIRST_TOKENS - 4:
        driver.step()
    assert not request.admitted
    assert driver.scheduler.manager.lookup(request).num_tokens <= 2 * BLOCK
    return request


def num_computed(driver: Driver, since: int) -> int:
    return sum(plan.num_tokens for plan in driver.plans[since:])


def finish(driver: Driver) -> None:
    driver.run()
    assert driver.outputs["first"] == expected_output(FIRST, FIRST_TOKENS)
    assert driver.outputs["second"] == expected_output(SECOND, SECOND_TOKENS)
    assert driver.scheduler.manager.usage == 0
    assert driver.scheduler.counters.external_hit_tokens == 0, "first admissions alone are counted there"


@pytest.fixture(params=[True, False], ids=["ahead", "step by step"])
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(
        num_blocks=NUM_BLOCKS,
        connector=True,
        async_scheduling=request.param,
        load_rule=LoadRule.ALWAYS,
        max_loading_share=1.0,
    )


def test_its_saved_blocks_are_loaded_and_not_computed_again(driver: Driver) -> None:
    request = preempted(driver)
    counters = driver.scheduler.counters
    assert counters.lookups_again == 0
    driver.step()
    assert counters.lookups_again == 0, "its blocks are not there yet"
    driver.end_saves()
    since = len(driver.plans)
    finish(driver)
    assert counters.lookups_again == 1
    loaded = NUM_COMPUTED_BLOCKS * BLOCK - request.num_local_hit_tokens
    assert counters.preempted_external_hit_tokens == loaded >= 7 * BLOCK
    assert request.num_preemptions == 1
    # Every plan of these computes a token of one of them, and nothing is computed again.
    in_blocks = len(SECOND) + SECOND_TOKENS - 1 - NUM_COMPUTED_BLOCKS * BLOCK
    assert num_computed(driver, since) <= in_blocks + 4


def test_it_does_not_wait_for_saves_that_take_long(driver: Driver) -> None:
    request = preempted(driver)
    since = len(driver.plans)
    finish(driver)
    assert driver.scheduler.counters.lookups_again == 0
    assert driver.scheduler.counters.preempted_external_hit_tokens == 0
    assert num_computed(driver, since) >= NUM_COMPUTED_BLOCKS * BLOCK - request.num_local_hit_tokens


def test_it_does_not_wait_for_the_second_answer(driver: Driver) -> None:
    request = preempted(driver)
    driver.end_saves()
    lookups = []
    while not request.admitted:
        plan = driver.plan()
        lookups += driver.scheduler.connector.take_lookups(driver.now_s)
        if plan is not None:
            driver.execute(plan)
    assert [attempt for _, attempt in lookups] == [1]
    assert driver.scheduler.num_waiting == 0
    # The answer comes when it runs already.
    stored = driver.store.stored(driver.scheduler.manager.groups, request.block_hashes)
    driver.scheduler.answer_lookup(request, 1, stored, driver.store.generation)
    finish(driver)
    assert driver.scheduler.counters.preempted_external_hit_tokens == 0


def test_when_nothing_was_on_its_way_once_is_enough(driver: Driver) -> None:
    driver.scheduler.connector.set_generation(driver.store.generation)
    driver.add("first", FIRST, FIRST_TOKENS)
    request = driver.add("second", SECOND, SECOND_TOKENS)
    finish(driver)
    assert request.num_preemptions >= 1
    assert driver.scheduler.counters.lookups_again <= request.num_preemptions
    assert driver.scheduler.counters.preempted_external_hit_tokens > 0
