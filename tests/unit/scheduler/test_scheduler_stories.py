"""Stories of the scheduler: budgets, order, preemption, options, what each plan says exactly."""

from typing import Any

import pytest

from reprise_core.errors import Exhausted, InvalidInput
from reprise_core.requests import FinishReason, SamplingParams
from reprise_core.steps import unpack_ids
from reprise_scheduler.sched.config import KvRole, LoadFailurePolicy, SchedulingPolicy
from support.sched_driver import Driver
from support.sim_worker import expected_output

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def sizes(plan) -> list[int]:
    return [item.num_new_tokens for item in plan.scheduled]


def test_a_prompt_is_computed_in_chunks_under_the_budget_beside_running_requests() -> None:
    driver = Driver(max_num_batched_tokens=6)
    driver.add("a", PROMPT, max_tokens=5)
    assert sizes(driver.step()) == [6]
    driver.add("b", [20] * 9, max_tokens=2)
    assert sizes(driver.step()) == [4, 2]  # a's rest, then what is left for b
    plan = driver.step()
    assert sizes(plan) == [1, 5]
    assert [item.sample for item in plan.scheduled] == [True, False]
    driver.run()
    assert driver.outputs == {"a": expected_output(PROMPT, 5), "b": expected_output([20] * 9, 2)}


def test_without_chunked_prefill_a_prompt_waits_for_a_step_with_room() -> None:
    driver = Driver(max_num_batched_tokens=12, enable_chunked_prefill=False)
    driver.add("a", PROMPT)
    driver.add("b", PROMPT[::-1])
    assert sizes(driver.step()) == [10]
    assert sizes(driver.step()) == [1, 10]


def test_a_long_prompt_gets_at_most_the_threshold() -> None:
    driver = Driver(long_prefill_token_threshold=3)
    driver.add("a", PROMPT)
    assert [sizes(driver.step())[0] for _ in range(5)] == [3, 3, 3, 1, 1]


def test_at_most_max_num_seqs_run() -> None:
    driver = Driver(max_num_seqs=2)
    for name in "abc":
        driver.add(name, [ord(name) % 40, 5, 6], max_tokens=3)
    assert len(driver.step().scheduled) == 2
    driver.run()
    assert all(len(tokens) == 3 for tokens in driver.outputs.values())


def test_a_hit_leaves_the_last_token_to_compute() -> None:
    driver = Driver()
    driver.add("a", PROMPT[:8])
    driver.run()
    request = driver.add("b", PROMPT[:8])
    plan = driver.step()
    assert sizes(plan) == [4]  # 8 tokens fill two blocks, but only (8 - 1) // 4 = 1 may hit
    assert request.prompt_sources.device == 4


def test_a_request_hits_what_another_fills_in_the_same_step() -> None:
    driver = Driver()
    driver.add("a", PROMPT)
    driver.add("b", PROMPT)
    plan = driver.step()
    assert sizes(plan) == [10, 2]
    tables = [unpack_ids(added.block_ids[0]) for added in plan.added]
    assert tables[0][:2] == tables[1][:2]
    driver.run()
    assert driver.outputs["b"] == expected_output(PROMPT, 4)


def test_the_latest_is_preempted_looked_up_again_and_resumed() -> None:
    driver = Driver(num_blocks=8)  # 7 usable blocks of 4
    driver.add("a", PROMPT, max_tokens=14)
    driver.add("b", PROMPT[::-1], max_tokens=14)
    driver.run()
    assert driver.scheduler.counters.preemptions >= 1
    assert driver.outputs["a"] == expected_output(PROMPT, 14)
    assert driver.outputs["b"] == expected_output(PROMPT[::-1], 14)
    removed = [handle for plan in driver.plans for handle in plan.removed]
    assert removed[0] == driver.plans[0].added[1].handle  # b, not a


def test_by_priority_the_lowest_is_preempted_and_the_highest_admitted_first() -> None:
    driver = Driver(num_blocks=8, policy=SchedulingPolicy.PRIORITY, max_num_seqs=2)
    low = driver.add("low", PROMPT, max_tokens=14, priority=5)
    driver.step()
    driver.add("high", PROMPT[::-1], max_tokens=14, priority=1)
    driver.add("middle", [30] * 5, max_tokens=2, priority=3)
    driver.run()
    assert low.num_preemptions >= 1
    order = list(driver.finished)
    assert order.index("high") < order.index("low")
    assert driver.outputs["low"] == expected_output(PROMPT, 14)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"must_fit": False},
        {"watermark": 0.2},
        {"max_num_batched_tokens": 5},
        {"long_prefill_token_threshold": 2},
        {"enable_caching": False},
        {"policy": SchedulingPolicy.PRIORITY},
        {"max_num_seqs": 1},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 24},
        {"tenant_weights": {"even": 3.0}},
        {"policy": SchedulingPolicy.PRIORITY, "tenant_max_priority": {"even": 1}},
        {"block_size": 1},
        {"block_size": 7},
        {"num_blocks": 6},
        {"max_model_len": 16},
    ],
    ids=str,
)
def test_no_option_changes_a_token(async_scheduling: bool, options: dict) -> None:
    driver = Driver(async_scheduling=async_scheduling, **{"num_blocks": 16, **options})
    prompts = {f"r{i}": [*PROMPT[: 3 + i], 20 + i] for i in range(7)}
    for i, (name, prompt) in enumerate(prompts.items()):
        driver.add(name, prompt, max_tokens=9, tenant="odd" if i % 2 else "even", priority=-(i % 3))
    in_flight = []
    for _ in range(400):
        while (plan := driver.plan()) is not None:
            in_flight.append(plan)
        if not in_flight:
            break
        driver.execute(in_flight.pop(0))
    for name, prompt in prompts.items():
        num_tokens = min(9, driver.scheduler.config.max_model_len - len(prompt))
        assert driver.outputs[name] == expected_output(prompt, num_tokens), name
    assert driver.scheduler.manager.usage == 0


def test_ahead_of_a_result_the_next_step_is_planned_and_no_further() -> None:
    driver = Driver(async_scheduling=True)
    driver.add("a", PROMPT, max_tokens=3)
    first, second = driver.plan(), driver.plan()
    assert driver.plan() is None  # two in flight
    assert (first.step_id, second.step_id) == (1, 2)
    assert second.scheduled[0].num_computed_tokens == 10
    driver.execute(first)
    third = driver.plan()
    driver.execute(second)
    driver.execute(third)
    assert driver.outputs["a"] == expected_output(PROMPT, 3)
    assert driver.finished["a"] == "length"
    assert driver.plan().removed  # only the worker's memory of it is left to drop


def test_a_block_that_a_placeholder_fills_gets_its_hash_when_the_token_is_known() -> None:
    driver = Driver(async_scheduling=True)
    request = driver.add("a", PROMPT[:7], max_tokens=6)
    (
        first,
        second,
    ) = driver.plan(), driver.plan()  # the second computes output token 1, in slot 8
    assert len(request.block_hashes) == 1
    hashes = {driver.scheduler.manager.block_hash_of(b) for b in range(1, 6)} - {None}
    assert len(hashes) == 1
    driver.execute(first)
    driver.plan()
    driver.execute(second)
    hashes = {driver.scheduler.manager.block_hash_of(b) for b in range(1, 6)} - {None}
    assert hashes == set(request.block_hashes[:2])


def test_an_end_of_sequence_token_ends_unless_ignored_or_too_early() -> None:
    output = expected_output(PROMPT, 12)
    stop = output[5]
    first = output.index(stop)
    driver = Driver()
    driver.add("stops", PROMPT, sampling=SamplingParams(max_tokens=12, stop_token_ids=(stop,)))
    driver.add("later", PROMPT, sampling=SamplingParams(max_tokens=12, stop_token_ids=(stop,), min_tokens=12))
    driver.run()
    assert driver.outputs["stops"] == output[: first + 1]
    assert driver.finished["stops"] == "stop"
    assert len(driver.outputs["later"]) == 12


def test_the_context_ends_a_request_with_length() -> None:
    driver = Driver(max_model_len=14)
    driver.add("a", PROMPT, max_tokens=100)
    driver.run()
    assert driver.outputs["a"] == expected_output(PROMPT, 4)
    assert driver.finished["a"] == "length"


def test_what_can_never_run_is_refused_with_the_numbers() -> None:
    driver = Driver(num_blocks=4, max_model_len=100)  # the pool holds 12 tokens
    with pytest.raises(InvalidInput, match=r"prompt: 12 tokens .* may have 12 tokens"):
        driver.add("a", list(range(4, 16)))
    full = Driver(max_num_waiting=1)
    full.add("a", PROMPT)
    with pytest.raises(Exhausted, match="1 requests wait, at most 1 may"):
        full.add("b", PROMPT)


def test_cancelled_before_its_first_step_leaves_nothing_cached() -> None:
    driver = Driver()
    request = driver.add("a", PROMPT)
    driver.scheduler.finish(request, FinishReason.ABORT)
    again = driver.add("b", PROMPT)
    driver.step()
    assert again.prompt_sources.device == 0


def test_blocks_come_back_from_the_store_after_a_reset() -> None:
    driver = Driver(connector=True)
    driver.add("a", PROMPT, max_tokens=8)
    driver.run()
    assert len(driver.store.blocks) == (len(PROMPT) + 8 - 1) // 4
    assert driver.scheduler.reset_prefix_cache(preempt_running=False)
    request = driver.add("b", PROMPT, max_tokens=8)
    driver.run()
    assert driver.outputs["b"] == expected_output(PROMPT, 8)
    assert request.prompt_sources.external == (len(PROMPT) - 1) // 4 * 4
    assert driver.scheduler.counters.external_hit_tokens == 8


def test_local_hits_leave_only_the_rest_to_ask_the_store_for() -> None:
    """1,000 tokens, 600 of them here, 200 more in the store: queries and hits 1,000/600 and 400/200."""
    driver = Driver(connector=True, num_blocks=600, max_num_batched_tokens=4096)
    tokens = [4 + i * i % 46 for i in range(1001)]
    driver.add("stored", [*tokens[:800], 4], max_tokens=1)
    driver.run()
    driver.scheduler.reset_prefix_cache(preempt_running=False)
    stored, driver.store.blocks = driver.store.blocks, {}
    driver.add("local", [*tokens[:600], 5], max_tokens=1)
    driver.run()
    driver.store.blocks = stored
    driver.scheduler.manager.take_stats()
    before = driver.scheduler.counters.copy()
    driver.add("asked", tokens[:1000], max_tokens=1)
    driver.run()
    stats, counters = driver.scheduler.manager.take_stats(), driver.scheduler.counters
    assert (stats.queries, stats.hits) == (1000, 600)
    assert counters.external_queried_tokens - before.external_queried_tokens == 400
    assert counters.external_hit_tokens - before.external_hit_tokens == 200


def test_preempted_and_computed_again_is_no_hit_in_the_counters() -> None:
    driver = Driver(num_blocks=12, max_num_seqs=4)
    for i in range(8):
        driver.add(f"r{i}", [4 + i, 40 - i, *range(10, 18)], max_tokens=16)
    driver.run()
    stats = driver.scheduler.manager.take_stats()
    assert driver.scheduler.counters.preemptions > 0
    assert (stats.requests, stats.queries, stats.hits) == (8, 80, 0)
    assert stats.preempted_requests == driver.scheduler.counters.preemptions


def test_a_short_load_is_cut_to_its_last_good_block_and_the_rest_computed() -> None:
    driver = Driver(connector=True)
    prompt = [*range(4, 37)]
    driver.add("a", prompt, max_tokens=2)
    driver.run()
    driver.scheduler.reset_prefix_cache(preempt_running=False)
    request = driver.add("b", prompt, max_tokens=2)
    driver.plan()
    driver.answer_lookups()
    refused = request.block_hashes[2]
    del driver.store.blocks[refused]  # block 3 of 8 fails
    driver.run()
    assert driver.outputs["b"] == expected_output(prompt, 2)
    assert request.prompt_sources.external == 8
    assert driver.scheduler.counters.external_hit_tokens == 8
    assert driver.scheduler.counters.load_failures == 1


def test_without_chunked_prefill_the_context_is_no_longer_than_a_step() -> None:
    driver = Driver(max_num_batched_tokens=12, enable_chunked_prefill=False)
    with pytest.raises(InvalidInput, match="prompt and answer together may have 12 tokens"):
        driver.add("a", list(range(4, 16)))
    driver.add("b", PROMPT, max_tokens=9)
    driver.run()
    assert driver.outputs["b"] == expected_output(PROMPT, 2)


def stored(prompt: list[int], **config: Any) -> Driver:
    """Prompt and answer are in the store and no longer on the device."""
    driver = Driver(connector=True, **config)
    driver.scheduler.connector.set_generation(driver.store.generation)
    driver.add("first", prompt, max_tokens=2)
    driver.run()
    driver.scheduler.reset_prefix_cache(preempt_running=False)
    return driver


def test_a_load_that_fails_ends_its_request_where_that_is_asked_for() -> None:
    prompt = [*range(4, 37)]
    driver = stored(prompt, load_failure_policy=LoadFailurePolicy.FAIL)
    request = driver.add("b", prompt, max_tokens=2)
    driver.plan()
    driver.answer_lookups()
    refused = request.block_hashes[2]
    content = driver.store.blocks.pop(refused)
    driver.step()
    assert driver.finished["b"] == (
        "kv_load_failure_policy is fail: 1 external blocks could not be loaded (missing)"
    )
    assert request.finish_reason is FinishReason.ERROR
    assert driver.scheduler.manager.usage == 0
    driver.store.blocks[refused] = content
    again = driver.add("again", prompt, max_tokens=2)
    driver.run()
    assert again.prompt_sources.device == 0  # nothing of the failed load is found
    assert driver.outputs["again"] == expected_output(prompt, 2)


def test_a_producer_only_saves_and_a_consumer_only_loads() -> None:
    prompt = [*range(4, 37)]
    producer = stored(prompt, kv_role=KvRole.PRODUCER)
    request = producer.add("b", prompt, max_tokens=2)
    producer.run()
    assert len(producer.store.blocks) == 8
    assert request.prompt_sources.external == 0
    consumer = stored(prompt, kv_role=KvRole.CONSUMER)
    assert not consumer.store.blocks
    consumer.store.blocks = producer.store.blocks
    request = consumer.add("b", prompt, max_tokens=2)
    consumer.run()
    assert request.prompt_sources.external == 32
    assert consumer.outputs["b"] == producer.outputs["b"] == expected_output(prompt, 2)
