"""Somebody else resets the external tier: this engine's old blocks do not come back into it."""

import random

from support.sched_driver import Driver
from support.sim_worker import expected_output

BLOCK = 4
NUM_BLOCKS = 8


def prompt_of(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(4, 50) for _ in range(NUM_BLOCKS * BLOCK + 1)]


def warm(*prompts: list[int]) -> Driver:
    """On the device and in the store."""
    driver = Driver(connector=True, num_blocks=200)
    driver.scheduler.connector.set_generation(driver.store.generation)
    for number, prompt in enumerate(prompts):
        driver.add(f"warm{number}", prompt, max_tokens=1)
    driver.run()
    assert len(driver.store.blocks) == NUM_BLOCKS * len(prompts)
    return driver


def reset_by_another(driver: Driver) -> None:
    driver.store.generation += 1
    driver.store.blocks.clear()


def test_blocks_of_before_are_served_but_not_saved_again() -> None:
    old, new = prompt_of(1), prompt_of(2)
    driver = warm(old)
    reset_by_another(driver)
    request = driver.add("old", old, max_tokens=5)  # fills a block, so that it has something to save
    fresh = driver.add("new", new, max_tokens=1)
    driver.run()
    assert request.prompt_sources is not None
    assert request.prompt_sources.device == NUM_BLOCKS * BLOCK
    assert set(driver.store.blocks) == {*fresh.block_hashes[:NUM_BLOCKS], request.block_hashes[NUM_BLOCKS]}
    # Computed anew, also in the same places, they are of today.
    assert driver.scheduler.reset_prefix_cache(preempt_running=False)
    driver.store.blocks.clear()
    again = driver.add("again", old, max_tokens=1)
    driver.run()
    assert set(driver.store.blocks) >= set(again.block_hashes[:NUM_BLOCKS])


def test_a_store_that_is_met_for_the_first_time_gets_what_is_on_the_device() -> None:
    prompt = prompt_of(1)
    driver = Driver(connector=True, num_blocks=200)
    driver.add("before", prompt, max_tokens=1)
    driver.plan()
    ((request, attempt),) = driver.scheduler.connector.take_lookups(0.0)
    driver.scheduler.answer_lookup(request, attempt, request.external.stored, None)  # it is away
    driver.run()
    assert not driver.store.blocks
    driver.add("after", prompt, max_tokens=5)
    driver.run()
    assert len(driver.store.blocks) == NUM_BLOCKS + 1


def test_a_load_that_began_before_brings_nothing() -> None:
    prompt = prompt_of(1)
    driver = warm(prompt)
    assert driver.scheduler.reset_prefix_cache(preempt_running=False)
    driver.hold_loads = True
    request = driver.add("load", prompt)
    driver.step()
    assert driver.worker.loads
    driver.scheduler.connector.set_generation(driver.store.generation + 1)
    driver.end_loads()  # with the values of before
    assert request.num_computed_tokens == 0
    assert not driver.scheduler.manager.has_cached_blocks
    driver.run()
    assert driver.outputs["load"] == expected_output(prompt, 4)
    assert request.prompt_sources is not None
    assert request.prompt_sources.external == 0
    assert driver.scheduler.counters.external_hit_tokens == 0
    assert driver.scheduler.manager.usage == 0
