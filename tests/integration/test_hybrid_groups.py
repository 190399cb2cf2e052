"""A model with windowed and full layers: its groups have tables of their own, and no token changes."""

import asyncio

import pytest

from reprise_core.kv_events import BlockStored
from reprise_core.requests import SamplingParams
from support.real_engine import NUM_TOKENS, PROMPTS, Model, connected, one_process_engine, tiny_model
from support.store_harness import running_store
from support.tiny_models import HYBRID
from support.waiting import until

WINDOW = HYBRID["sliding_window"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("hybrid") / "model", **HYBRID)


CASES: dict[str, dict[str, object]] = {
    "as it comes": {},
    "async scheduling off": {"async_scheduling": False},
    "chunks of a few tokens": {"max_num_batched_tokens": 7},
    "admitted by the first chunk": {
        "must_fit": False,
        "max_num_batched_tokens": 16,
        "worker": {"num_blocks": 34},
    },
    "no prefix caching": {"enable_prefix_caching": False},
    "whole prompt hits": {"full_prompt_hit": True, "worker": {"num_blocks": 400}},
    "blocks of 1": {"worker": {"block_size": 1, "num_blocks": 200}},
    "blocks of 16": {"worker": {"block_size": 16, "num_blocks": 14}},
    "one table for all layers": {"worker": {"hybrid_groups": "off"}},
}


@pytest.mark.parametrize("case", CASES)
async def test_greedy_tokens_are_those_of_transformers(model: Model, case: str) -> None:
    engine = one_process_engine(model, num_blocks=60, **CASES[case])
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    await engine.start()
    try:
        kinds = [group.kind for group in engine._engine.capacity.groups]
        assert kinds == ["full_attention", "sliding_window"][: 1 if "one table" in case else 2]
        # At once from an empty cache, and again on what that left in it.
        for _ in range(2):
            answers = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in PROMPTS))
            assert answers == model.wanted
        scheduler = engine._engine.scheduler
        assert (scheduler.manager.take_stats().hits == 0) is (case == "no prefix caching")
        if case == "admitted by the first chunk":
            assert scheduler.counters.preemptions > 0
    finally:
        await engine.stop()


async def test_blocks_before_the_window_are_given_back(model: Model) -> None:
    """A long prompt holds all blocks of the full group, and a window's of the other."""
    engine = one_process_engine(model, num_blocks=100, max_num_batched_tokens=16)
    await engine.start()
    try:
        scheduler = engine._engine.scheduler
        held = []
        apply_result = scheduler.apply_result

        def watched(result, *, now_s):
            for request in scheduler.running.values():
                tables = scheduler.manager.block_ids(request.request_id)
                held.append([sum(map(bool, table)) for table in tables])
            return apply_result(result, now_s=now_s)

        scheduler.apply_result = watched
        prompt = [3 + (i * i) % 90 for i in range(120)]
        await engine.generate(prompt, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
        full, windowed = held[-1]
        assert full >= (len(prompt) + 19) // 4
        assert windowed <= (WINDOW - 1 + 4) // 4 + 1
        # While the prompt is computed in chunks: a window and a chunk.
        assert max(counts[1] for counts in held) <= (WINDOW - 1 + 16) // 4 + 1
    finally:
        await engine.stop()


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Three groups: two full layers, two windowed ones, and one more."""
    kinds = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    changes = {**HYBRID, "num_hidden_layers": 5, "layer_types": kinds}
    return tiny_model(tmp_path_factory.mktemp("uneven") / "model", **changes)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One group, all of whose layers have a window."""
    return tiny_model(tmp_path_factory.mktemp("windowed") / "model", kind="Mistral", sliding_window=WINDOW)


@pytest.mark.parametrize(("which", "num_groups"), [("model", 2), ("uneven", 3), ("windowed", 1)])
async def test_one_engine_saves_and_another_loads(
    request: pytest.FixtureRequest, which: str, num_groups: int
) -> None:
    """Two engines after each other, one store: the second computes less and answers the same."""
    model: Model = request.getfixturevalue(which)
    async with running_store() as store:
        async with connected(model, store, kv_role="kv_producer") as first:
            await first.ask("first", model.wanted)
            assert len(first.harness.app._loop.capacity.groups) == num_groups
            await until(lambda: store.app.store.stats().host_blocks > 30 * num_groups)
        async with connected(model, store, kv_load_failure_policy="fail") as second:
            await second.ask("loads", model.wanted)
            assert await second.harness.metric("vllm:external_prefix_cache_hits_total") > 100
            assert await second.harness.metric("reprise_scheduler_load_failures_total") == 0
            await second.forget()
            await second.ask("again", model.wanted)


async def test_a_windowed_group_that_lacks_blocks_is_a_shorter_hit_or_none(model: Model) -> None:
    """Of the windowed group every third block is lost after the look-up: loads fail, tokens do not change."""
    async with running_store(shared_memory="off") as store:  # so that every block is asked for
        async with connected(model, store, kv_role="kv_producer") as first:
            await first.ask("first", model.wanted)
            await until(lambda: store.app.store.stats().host_blocks > 60)
        load = store.app.store.load
        num_lost = 0

        async def losing(keyspace, generation, keys, land=None):
            nonlocal num_lost
            loaded = await load(keyspace, generation, keys, land)
            for index, key in enumerate(keys):
                if key.group_id == 1 and key.block_hash[0] % 3 == 0:
                    loaded.values[index] = None
                    num_lost += 1
            return loaded

        store.app.store.load = losing
        async with connected(model, store) as second:
            await second.ask("loads", model.wanted)
            assert num_lost
            assert await second.harness.metric("reprise_scheduler_load_failures_total") > 0


async def test_events_tell_the_group_its_kind_and_window(model: Model) -> None:
    engine = one_process_engine(model, num_blocks=60)
    events: list[object] = []
    engine._engine._event_sink.send = events.extend
    await engine.start()
    try:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        await engine.generate(PROMPTS[4], sampling)
    finally:
        await engine.stop()
    told = {
        (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        for event in events
        if isinstance(event, BlockStored)
    }
    assert told == {(0, "full_attention", None), (1, "sliding_window", WINDOW)}
    stored = [event for event in events if isinstance(event, BlockStored)]
    hashes = [
        {name for event in stored if event.group_idx == group for name in event.block_hashes}
        for group in (0, 1)
    ]
    # Every block of the prompt is cached while it is in the window, in both groups.
    assert hashes[0] == hashes[1]
