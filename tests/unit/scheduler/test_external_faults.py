"""Loads from the store that fail, come late, are shared, or are not worth it. Names beginning with a letter
and a number are faults that caches elsewhere have had, under the names they were collected by."""

import random
from dataclasses import replace
from typing import Any

import pytest

from reprise_core.errors import ErrorKind
from reprise_core.extra_keys import LoraAdapter
from reprise_core.kv_events import AllBlocksCleared
from reprise_core.requests import FinishReason
from reprise_scheduler.kv_cache.miss_reasons import MissKind
from reprise_scheduler.sched.config import LoadFailurePolicy, SchedulingPolicy
from reprise_scheduler.sched.load_cost import MIN_LOADS, MIN_STEPS, PROBE_EVERY, LoadRule
from reprise_scheduler.sched.request import RequestStatus
from support.sched_driver import Driver
from support.sim_worker import SimWorker, expected_output

BLOCK = 4


def prompt_of(num_blocks: int, number: int = 0) -> list[int]:
    """That many full blocks and one token."""
    rng = random.Random(number)
    return [rng.randrange(4, 50) for _ in range(num_blocks * BLOCK + 1)]


def stored(*prompts: list[int], **config: Any) -> Driver:
    """The prompts' blocks are in the store and no longer on the device."""
    driver = Driver(connector=True, **{"num_blocks": 400, "max_num_batched_tokens": 4096, **config})
    driver.scheduler.connector.set_generation(driver.store.generation)
    for number, prompt in enumerate(prompts):
        driver.add(f"stored{number}", prompt, max_tokens=1)
    driver.run()
    assert driver.scheduler.reset_prefix_cache(preempt_running=False)
    return driver


def ask(driver: Driver) -> None:
    driver.plan()
    driver.answer_lookups()


def cached_hashes(driver: Driver) -> set[bytes]:
    return set(driver.scheduler.manager._pool.indexes[0].first)


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_left", [0, 3])
def test_g2_blocks_that_go_between_look_up_and_allocation_are_a_shorter_hit(num_left: int) -> None:
    prompt = prompt_of(8)
    driver = stored(prompt)
    request = driver.add("b", prompt)
    ask(driver)
    for block_hash in request.block_hashes[num_left:8]:
        del driver.store.blocks[block_hash]
    driver.run()
    assert driver.outputs["b"] == expected_output(prompt, 4)
    assert request.prompt_sources is not None
    assert request.prompt_sources.external == num_left * BLOCK
    assert driver.scheduler.counters.external_hit_tokens == num_left * BLOCK
    assert driver.scheduler.manager.usage == 0


def test_g3_every_block_of_a_long_prompt_is_stored_and_found() -> None:
    prompt = prompt_of(217)[:-1]  # exactly 217 blocks
    driver = stored(prompt, max_num_batched_tokens=64)
    assert len(driver.plans) > 217 * BLOCK // 64
    request = driver.add("again", prompt, max_tokens=1)
    hashes = request.block_hashes
    assert sum(block_hash in driver.store.blocks for block_hash in hashes) == 217
    driver.run()
    assert request.prompt_sources is not None
    assert request.prompt_sources.external == 216 * BLOCK  # the last token is computed
    assert driver.scheduler.counters.external_hit_tokens == 216 * BLOCK


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_g4_reads_that_fail_change_no_token_and_only_what_arrived_is_a_hit(async_scheduling: bool) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts = [prompt_of(rng.randint(1, 8), number) for number in range(20)]
    driver = stored(*prompts, async_scheduling=async_scheduling, num_blocks=60, max_num_waiting=200)
    arrived = failed = 0

    def fail() -> bool:
        nonlocal failed
        failed += (fails := rng.random() < 0.3)
        return fails

    driver.fail_load = fail
    for number in range(100):
        prompt = prompts[number % 20]
        driver.scheduler.reset_prefix_cache(preempt_running=True)
        driver.now_s += 11  # what failed is asked for again
        request = driver.add(f"r{number}", prompt)
        driver.run()
        assert driver.outputs[f"r{number}"] == expected_output(prompt, 4)
        assert request.prompt_sources is not None
        arrived += request.prompt_sources.external
    counters = driver.scheduler.counters
    assert failed > 20
    assert counters.load_failures == failed
    assert counters.external_hit_tokens == arrived > 0


@pytest.mark.parametrize("policy", list(LoadFailurePolicy))
def test_h1_a_refused_block_is_recomputed_from_there_or_ends_the_request(policy: LoadFailurePolicy) -> None:
    prompt = prompt_of(8)
    driver = stored(prompt, load_failure_policy=policy)
    request = driver.add("b", prompt)
    ask(driver)
    del driver.store.blocks[request.block_hashes[2]]  # block 3 of 8
    driver.run()
    assert driver.scheduler.manager.usage == 0
    if policy is LoadFailurePolicy.RECOMPUTE:
        assert driver.outputs["b"] == expected_output(prompt, 4)
        assert driver.scheduler.counters.external_hit_tokens == 2 * BLOCK
        # It is stored again, so that the next one does not fail.
        assert request.block_hashes[2] in driver.store.blocks
    else:
        assert request.finish_reason is FinishReason.ERROR
        assert "1 external blocks could not be loaded (missing)" in driver.finished["b"]
        assert driver.scheduler.counters.external_hit_tokens == 0
        assert not cached_hashes(driver)


@pytest.mark.parametrize("policy", list(LoadFailurePolicy))
def test_h2_of_two_that_share_a_prefix_neither_reads_what_was_not_loaded(policy: LoadFailurePolicy) -> None:
    prompt = prompt_of(16)
    driver = stored(prompt, load_failure_policy=policy)
    driver.hold_loads = True
    first = driver.add("first", prompt)
    driver.step()
    second = driver.add("second", prompt)  # arrives during the load
    driver.step()
    assert (first.status, second.status) == (RequestStatus.LOADING, RequestStatus.WAITING)
    assert len(driver.worker.loads) == 1, "what is being loaded is not loaded twice"
    driver.fail_load = lambda: True
    driver.end_loads()
    assert not cached_hashes(driver), "nothing of a failed load is in the cache"
    driver.hold_loads = False
    driver.run()  # the simulated worker checks every slot that is read
    assert driver.outputs["second"] == expected_output(prompt, 4)
    if policy is LoadFailurePolicy.RECOMPUTE:
        assert driver.outputs["first"] == expected_output(prompt, 4)
    else:
        assert first.finish_reason is FinishReason.ERROR
    assert driver.scheduler.counters.external_hit_tokens == 0


def test_h3_of_three_sharers_the_first_recomputes_and_the_others_wait_and_hit() -> None:
    prompt = prompt_of(16)
    driver = stored(prompt, policy=SchedulingPolicy.PRIORITY)
    driver.hold_loads = True
    requests = [driver.add(f"p{priority}", prompt, priority=priority) for priority in (3, 1, 2)]
    driver.step()
    driver.step()
    assert [request.status for request in requests].count(RequestStatus.LOADING) == 1
    assert requests[1].status is RequestStatus.LOADING, "the most important one loads"
    bad = requests[0].block_hashes[5]
    driver.store.blocks.pop(bad)
    before = len(driver.plans)
    driver.end_loads()
    driver.hold_loads = False
    driver.run()
    computed = sum(plan.num_tokens for plan in driver.plans[before:])
    # Once from the bad block on, then what the others have to themselves: a token each, and the answers.
    assert computed == 11 * BLOCK + 1 + 2 + 3 * 3
    sources = [request.prompt_sources for request in requests]
    assert [source.external for source in sources if source] == [0, 5 * BLOCK, 0]
    assert [source.device for source in sources if source] == [16 * BLOCK, 0, 16 * BLOCK]
    assert driver.scheduler.counters.load_failures == 1
    for priority in (1, 2, 3):
        assert driver.outputs[f"p{priority}"] == expected_output(prompt, 4)


def test_a_block_that_failed_is_asked_for_again_after_a_while() -> None:
    prompt = prompt_of(4)
    driver = stored(prompt)
    driver.fail_load = lambda: True
    for name, num_loads in (("a", 1), ("b", 1), ("c", 2)):
        driver.scheduler.reset_prefix_cache(preempt_running=False)
        if name == "c":
            driver.now_s = 11.0
        driver.add(name, prompt)
        driver.run()
        assert driver.scheduler.counters.loads_started == num_loads
        assert driver.outputs[name] == expected_output(prompt, 4)


# -- limits ---------------------------------------------------------------------------------------


def test_loads_fill_no_more_than_their_share_and_others_pass_those_that_wait() -> None:
    prompts = [prompt_of(10, number) for number in range(4)]
    driver = stored(*prompts, num_blocks=61, max_loading_share=0.4)
    driver.hold_loads = True
    loaders = [driver.add(f"load{number}", prompt) for number, prompt in enumerate(prompts)]
    plain = driver.add("plain", prompt_of(3, 99))
    for _ in range(4):
        driver.step()
    assert [request.status for request in loaders].count(RequestStatus.LOADING) == 2  # 20 of 24 blocks
    assert driver.scheduler.gate.num_held_blocks == 20
    assert driver.outputs["plain"], "it needs no load and does not wait for one"
    assert plain.status is not RequestStatus.WAITING
    driver.hold_loads = False
    driver.end_loads()
    driver.run()
    for number, prompt in enumerate(prompts):
        assert driver.outputs[f"load{number}"] == expected_output(prompt, 4)
    assert driver.scheduler.gate.num_held_blocks == 0


def test_a_load_that_alone_exceeds_the_share_is_cut_to_it() -> None:
    prompt = prompt_of(20)
    driver = stored(prompt, num_blocks=41, max_loading_share=0.25, track_misses=True)
    alone = driver.add("alone", prompt, max_tokens=1)
    driver.run()
    assert alone.prompt_sources is not None
    assert alone.prompt_sources.external == 20 * BLOCK, "it starves nobody"
    driver.scheduler.reset_prefix_cache(preempt_running=False)
    driver.add("running", prompt_of(1, 99), max_tokens=20)
    driver.step()
    request = driver.add("b", prompt)
    driver.run()
    assert request.prompt_sources is not None
    assert request.prompt_sources.external == 10 * BLOCK
    assert driver.scheduler.counters.loads_skipped_no_room == 1
    assert request.miss is not None
    assert request.miss.rule == "no_room"
    assert driver.outputs["b"] == expected_output(prompt, 4)


def test_only_what_the_local_cache_lacks_is_loaded() -> None:
    prompt = prompt_of(12)
    driver = stored(prompt)
    driver.add("local", prompt[: 5 * BLOCK + 1], max_tokens=1)
    driver.run()
    driver.scheduler.counters.external_hit_tokens = 0
    request = driver.add("b", prompt)
    driver.run()
    loaded = [load for plan in driver.plans for load in plan.loads]
    assert loaded[-1].block_hashes == tuple(request.block_hashes[5:12])
    assert driver.scheduler.counters.external_hit_tokens == 7 * BLOCK


# -- worth it -------------------------------------------------------------------------------------


def measured(load_s: float, *, step_s: float = 0.01, **config: Any) -> Driver:
    """An engine that knows how long its steps and loads take."""
    prompts = [prompt_of(8 + number % 3, number) for number in range(MIN_STEPS + 1)]
    driver = Driver(connector=True, num_blocks=400, max_num_batched_tokens=4096, **config)
    driver.scheduler.connector.set_generation(driver.store.generation)
    driver.step_s = step_s
    for number, prompt in enumerate(prompts):
        driver.add(f"stored{number}", prompt, max_tokens=1)
        driver.run()
    driver.hold_loads = True
    for number in range(MIN_LOADS):
        driver.scheduler.reset_prefix_cache(preempt_running=False)
        driver.add(f"loaded{number}", prompts[number % len(prompts)], max_tokens=1)
        driver.step()
        driver.now_s += load_s
        driver.end_loads()
        driver.run()
    driver.hold_loads = False
    driver.scheduler.reset_prefix_cache(preempt_running=False)
    assert driver.scheduler.counters.loads_started == MIN_LOADS
    return driver


def test_a_load_that_takes_longer_than_computing_is_not_started_and_says_so() -> None:
    driver = measured(load_s=2.0, track_misses=True)
    request = driver.add("b", prompt_of(8))
    driver.run()
    assert driver.scheduler.counters.loads_started == MIN_LOADS
    assert driver.scheduler.counters.loads_skipped_slower == 1
    assert request.prompt_sources is not None
    assert request.prompt_sources.cached == 0
    assert request.miss is not None
    assert (request.miss.kind, request.miss.rule) == (MissKind.LOAD_SKIPPED, "slower_than_compute")
    assert driver.scheduler.lookup_misses[MissKind.LOAD_SKIPPED] == 1
    assert driver.outputs["b"] == expected_output(prompt_of(8), 4)


@pytest.mark.parametrize(
    ("load_s", "rule"), [(0.001, LoadRule.MEASURED), (2.0, LoadRule.ALWAYS)], ids=["fast", "always"]
)
def test_a_fast_load_is_started_and_where_that_is_asked_for_a_slow_one_too(
    load_s: float, rule: LoadRule
) -> None:
    driver = measured(load_s=load_s, load_rule=rule)
    request = driver.add("b", prompt_of(8))
    driver.run()
    assert request.prompt_sources is not None
    assert request.prompt_sources.external == 8 * BLOCK
    assert driver.scheduler.counters.loads_skipped_slower == 0


def test_a_slow_tier_is_tried_now_and_then() -> None:
    driver = measured(load_s=2.0)
    for number in range(2 * PROBE_EVERY):
        driver.scheduler.reset_prefix_cache(preempt_running=False)
        driver.add(f"b{number}", prompt_of(8), max_tokens=1)
        driver.now_s += 1
        driver.run()
    counters = driver.scheduler.counters
    # The one that was let through ended at once, on the driver's clock: the tier is fast again.
    assert counters.loads_skipped_slower < 2 * PROBE_EVERY
    assert counters.loads_started > MIN_LOADS


# -- adapters -------------------------------------------------------------------------------------


ADAPTER = LoraAdapter("a", 2, "/a", "ab" * 16)
GONE = "the worker does not serve this request's adapter any more"


def test_plans_name_the_adapter_of_each_request_save_and_load() -> None:
    prompt = prompt_of(8)
    driver = stored()
    driver.add("base", prompt)
    driver.add("adapted", prompt, lora=ADAPTER)
    driver.run()
    assert sorted(entry.adapter_id for plan in driver.plans for entry in plan.added) == [0, 2]
    saves = [save for plan in driver.plans for save in plan.saves]
    assert len(saves) == len({save.block_hash for save in saves})
    assert [sum(save.adapter_id == number for save in saves) for number in (0, 2)] == [9, 9]
    driver.plans.clear()
    driver.scheduler.reset_prefix_cache(preempt_running=False)
    request = driver.add("again", prompt, lora=ADAPTER)
    driver.run()
    assert request.prompt_sources is not None
    assert request.prompt_sources.external == 8 * BLOCK
    assert [load.adapter_id for plan in driver.plans for load in plan.loads] == [2]


@pytest.mark.parametrize(
    ("served", "problem"),
    [
        ((replace(ADAPTER, int_id=1),), ""),
        ((), f"{GONE}: lora.name: 'a', not allowed: this engine serves no adapters"),
        ((replace(ADAPTER, name="b"),), f"{GONE}: lora.name: 'a', must be one of 'b'"),
        ((replace(ADAPTER, path="/b"),), f"{GONE}: lora.path: '/a', must be '/b'"),
        ((replace(ADAPTER, digest="cd" * 16),), "lora.digest: 'abab"),
    ],
)
def test_a_request_goes_on_with_the_next_worker_only_if_it_serves_the_same_adapter(
    served: tuple[LoraAdapter, ...], problem: str
) -> None:
    """Its tokens so far are of that adapter's content. The others go on anyway."""
    prompt = prompt_of(4)
    driver = stored()
    scheduler = driver.scheduler
    requests = [driver.add("base", prompt), driver.add("adapted", prompt, lora=ADAPTER)]
    driver.step()
    driver.step()
    assert all(request.num_output_tokens for request in requests)
    scheduler.take_events()
    outputs = scheduler.open_session(scheduler.config, scheduler.kv_config, (), served)
    assert AllBlocksCleared() in scheduler.take_events()
    assert scheduler.manager.usage == 0
    assert [(output.request.owner, output.error.startswith(problem)) for output in outputs] == (
        [("adapted", True)] if problem else []
    )
    assert all(output.error_kind == ErrorKind.UNAVAILABLE.value for output in outputs), (
        "another engine may serve it"
    )
    driver.worker = SimWorker(400, BLOCK, driver.store)
    driver.plans.clear()
    driver.run()
    assert sorted(entry.adapter_id for plan in driver.plans for entry in plan.added) == (
        [0] if problem else [0, 1]
    )
    assert driver.outputs["base"] == expected_output(prompt, 4)
    assert len(driver.outputs["adapted"]) == 4 or problem
