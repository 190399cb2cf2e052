"""Greedy decoding by step plans gives the tokens of transformers' generate, whatever the plans."""

import random

import pytest

from reprise_core.ids import BlockHash
from reprise_core.steps import AddedRequest, BlockLoad, ScheduledRequest, StepPlan, WorkerSampling, pack_ids
from reprise_worker.model import PagedModel
from reprise_worker.runner import BadPlan
from support.runner_driver import GREEDY, Driver, NoMover, run_mixed_batches
from support.tiny_models import paged, plain_greedy, small_config, small_model

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return paged(small_model(small_config("Llama")))


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=length)


def test_one_request(model: PagedModel) -> None:
    driver = Driver(model)
    driver.add(1, prompt_of(11))
    driver.finish([1], NUM_TOKENS)
    assert driver.output(1) == plain_greedy(model, prompt_of(11), NUM_TOKENS)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_a_chunked_prompt(model: PagedModel, chunk: int) -> None:
    driver = Driver(model)
    driver.add(1, prompt_of(23))
    while driver.remaining(1) > chunk:
        assert driver.step({1: chunk}) == {}
    driver.finish([1], NUM_TOKENS)
    assert driver.output(1) == plain_greedy(model, prompt_of(23), NUM_TOKENS)


def test_mixed_batches_that_come_and_go(model: PagedModel) -> None:
    """Prefill, chunked prefill and decode in the same steps, finished requests' blocks reused."""
    prompts = {handle: prompt_of(3 + 5 * handle, seed=handle) for handle in range(1, 9)}
    driver = Driver(model, num_blocks=80)
    outputs = run_mixed_batches(driver, prompts, chunks=[1, 4, 9], num_tokens=NUM_TOKENS)
    for handle, prompt in prompts.items():
        assert outputs[handle] == plain_greedy(model, prompt, NUM_TOKENS), handle
    assert driver.runner.num_requests == len(driver._removed)


def test_a_prefix_hit_computes_the_rest_only(model: PagedModel) -> None:
    driver = Driver(model)
    shared = prompt_of(16)
    first, second = shared + prompt_of(5, seed=2), shared + prompt_of(6, seed=3)
    driver.add(1, first)
    driver.finish([1], NUM_TOKENS)
    driver.add(2, second, shared_blocks=driver.blocks[1][:4])
    driver.finish([2], NUM_TOKENS)
    assert driver.output(2) == plain_greedy(model, second, NUM_TOKENS)


def test_a_hit_on_blocks_that_the_same_step_fills(model: PagedModel) -> None:
    """Every layer writes all K and V before any is read."""
    driver = Driver(model)
    shared = prompt_of(16)
    first, second = shared + prompt_of(5, seed=2), shared + prompt_of(6, seed=3)
    blocks = driver.free[:6]
    driver.add(1, first)
    driver.add(2, second, shared_blocks=blocks[:4])
    driver.step({1: len(first), 2: len(second) - 16})
    assert driver.blocks[1] == blocks
    driver.finish([1, 2], NUM_TOKENS)
    for handle, prompt in ((1, first), (2, second)):
        assert driver.output(handle) == plain_greedy(model, prompt, NUM_TOKENS)


@pytest.mark.parametrize("left", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("kind", "changes"), [("Llama", {}), ("Gemma2", {"head_dim": 16, "sliding_window": 9})]
)
def test_what_others_left_in_a_block_is_not_seen(kind: str, changes: dict[str, int], left: float) -> None:
    """A request whose numbers overflowed, or a failed load."""
    model = paged(small_model(small_config(kind, **changes)))
    driver = Driver(model)
    for view in (*driver.kv.keys, *driver.kv.values):
        view[1:].fill_(left)
    prompts = {handle: prompt_of(2 + 3 * handle, seed=handle) for handle in range(1, 6)}
    for handle, prompt in prompts.items():
        driver.add(handle, prompt)
    driver.step({1: 1, 2: 4, 3: 6, 4: 14, 5: 9})
    driver.finish(list(prompts), NUM_TOKENS)
    for handle, prompt in prompts.items():
        assert driver.output(handle) == plain_greedy(model, prompt, NUM_TOKENS), handle


def test_a_fully_cached_prompt_computes_its_last_token(model: PagedModel) -> None:
    driver = Driver(model)
    prompt = prompt_of(16)
    driver.add(1, prompt)
    driver.finish([1], NUM_TOKENS)
    driver.add(2, prompt, shared_blocks=driver.blocks[1][:3])
    driver.step({2: 3})  # 12 of 16 tokens were there
    driver.finish([2], NUM_TOKENS)
    assert driver.output(2) == driver.output(1)


@pytest.mark.parametrize("sampling", [GREEDY, WorkerSampling(0.8, 0.9, 20, 1234)])
def test_a_preempted_request_resumes_as_if_nothing_happened(
    model: PagedModel, sampling: WorkerSampling
) -> None:
    driver = Driver(model)
    driver.add(1, prompt_of(9), sampling=sampling)
    driver.finish([1], NUM_TOKENS)
    undisturbed = driver.output(1)

    driver.add(2, prompt_of(9), sampling=sampling)
    driver.finish([2], 5)
    driver.remove(2)
    driver.add(3, driver.tokens[2], sampling=sampling, num_output=5)
    driver.finish([3], NUM_TOKENS)
    assert driver.output(3) == undisturbed


def test_banned_tokens_wait_for_min_tokens(model: PagedModel) -> None:
    expected = plain_greedy(model, prompt_of(9), 4)
    driver = Driver(model)
    banned = WorkerSampling(0.0, 1.0, 0, None, min_tokens=2, banned_token_ids=pack_ids(expected))
    driver.add(1, prompt_of(9), sampling=banned)
    driver.finish([1], 4)
    assert not set(driver.output(1)[:2]) & set(expected)


def test_a_copied_block_serves_like_the_original(model: PagedModel) -> None:
    driver = Driver(model)
    prompt = prompt_of(8) + prompt_of(3, seed=9)
    driver.add(1, prompt)
    driver.finish([1], NUM_TOKENS)
    copies = [driver.free.pop(), driver.free.pop()]
    driver.add(2, prompt, shared_blocks=copies)
    pairs = zip(driver.blocks[1], copies, strict=False)
    driver.step({2: 3}, copies=tuple((0, source, target) for source, target in pairs))
    driver.finish([2], NUM_TOKENS)
    assert driver.output(2) == driver.output(1)


def test_saves_are_copied_before_the_step_overwrites(model: PagedModel) -> None:
    """The order within a plan, seen from the mover: saves see the old content."""
    driver = Driver(model)
    driver.add(1, prompt_of(4))
    driver.step({1: 4})
    block = driver.blocks[1][0]
    before = driver.kv.keys[0][block].clone()
    seen = []

    class Watching(NoMover):
        def save(self, saves: object) -> int:
            seen.append(driver.kv.keys[0][block].clone())
            return 1

    driver.runner._mover = Watching()
    added = AddedRequest(7, pack_ids(prompt_of(4, seed=8)), 4, 0, (pack_ids([block]),), GREEDY)
    from support.runner_driver import block_save

    plan = StepPlan(
        2,
        removed=(1,),
        saves=(block_save(block, b"h" * 32),),
        added=(added,),
        scheduled=(ScheduledRequest(7, 0, 4, (), True),),
    )
    result = driver.runner.execute(plan)
    assert result.num_saves_dropped == 1
    assert seen[0].equal(before)
    assert not driver.kv.keys[0][block].equal(before)


def test_loads_begin_when_what_was_queued_is_over(model: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a load runs beside the steps: one that is still queued may write to its blocks."""
    driver = Driver(model)
    calls: list[str] = []
    monkeypatch.setattr(driver.kv, "copy_block", lambda source, target: calls.append("copy"))
    monkeypatch.setattr(driver.kv, "settle", lambda: calls.append("settle"))
    monkeypatch.setattr(driver.mover, "load", lambda loads: calls.append("load"))
    driver.add(1, prompt_of(9))
    load = BlockLoad(7, 0, pack_ids([5]), (BlockHash(b"h" * 32),), 0)
    driver.step({1: 4}, copies=((0, 3, 4),), loads=(load,))
    assert calls == ["copy", "settle", "load", "settle"]


def added(handle: int, *, tokens: int = 4, blocks: tuple[int, ...] = (1,)) -> AddedRequest:
    return AddedRequest(handle, pack_ids(range(3, 3 + tokens)), tokens, 0, (pack_ids(blocks),), GREEDY)


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (StepPlan(3), "step 3 follows step 1"),
        (StepPlan(2, removed=(9,)), "unknown handles"),
        (StepPlan(2, added=(added(1),)), "known"),
        (StepPlan(2, added=(added(5, blocks=(128,)),)), "block ids outside"),
        (StepPlan(2, copies=((0, 0, 5),)), "block ids outside"),
        (StepPlan(2, copies=((1, 1, 5),)), "names groups outside"),
        (StepPlan(2, scheduled=(ScheduledRequest(9, 0, 1, (), False),)), "handle 9"),
        (StepPlan(2, removed=(1,), scheduled=(ScheduledRequest(1, 0, 1, (), False),)), "handle 1"),
        (StepPlan(2, scheduled=(ScheduledRequest(1, 0, 9, (), False),)), "known ones"),
        (StepPlan(2, scheduled=(ScheduledRequest(1, 0, 3, (), True),)), "sampling after"),
        (StepPlan(2, scheduled=(ScheduledRequest(1, 4, 1, (), True),)), "do not fit"),
        (StepPlan(2, scheduled=(ScheduledRequest(1, 4, 1, (b"abc",), True),)), "packed ids"),
        (StepPlan(2, added=(added(5, tokens=0),)), "no tokens"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_anything_changes(
    model: PagedModel, plan: StepPlan, problem: str
) -> None:
    driver = Driver(model)
    first = StepPlan(1, added=(added(1),), scheduled=(ScheduledRequest(1, 0, 4, (), True),))
    driver.runner.execute(first)
    with pytest.raises(BadPlan, match=problem):
        driver.runner.execute(plan)
    assert driver.runner.num_requests == 1
    good = StepPlan(2, scheduled=(ScheduledRequest(1, 4, 1, (pack_ids([2]),), True),))
    assert len(driver.runner.execute(good).token_ids) == 4


def test_reset_forgets_requests_and_counts_from_one(model: PagedModel) -> None:
    driver = Driver(model)
    driver.runner.execute(StepPlan(1, added=(added(1),)))
    driver.runner.reset()
    driver.runner.execute(StepPlan(1, added=(added(1),)))
    assert driver.runner.num_requests == 1
