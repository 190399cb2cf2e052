"""Every option that could change a token, with a real model: greedy tokens are those of transformers."""

import asyncio

import pytest

from reprise_core.requests import SamplingParams
from support.real_engine import NUM_TOKENS, PROMPTS, Model, connected, one_process_engine, tiny_model
from support.store_harness import running_store
from support.waiting import until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


CASES: dict[str, dict[str, object]] = {
    "as it comes": {},
    "async scheduling off": {"async_scheduling": False},
    "chunked prefill off": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    "chunks of a few tokens": {"max_num_batched_tokens": 13},
    "long prefill threshold": {"long_prefill_token_threshold": 5},
    "priority": {"scheduling_policy": "priority"},
    "tenants": {"tenant_weights": {"a": 2.0}, "tenant_shares": {"a": 0.1}},
    "watermark": {"watermark": 0.2},
    "admitted by the first chunk": {"must_fit": False},
    "few at once": {"max_num_seqs": 2},
    "no prefix caching": {"enable_prefix_caching": False},
    "whole prompt hits": {"full_prompt_hit": True},
    "tokens verified": {"verify_tokens": True},
    "sha256_cbor": {"prefix_caching_hash_algo": "sha256_cbor"},
    "xxhash": {"prefix_caching_hash_algo": "xxhash"},
    "xxhash_cbor": {"prefix_caching_hash_algo": "xxhash_cbor"},
    "blocks of 1": {"worker": {"block_size": 1, "num_blocks": 120}},
    "blocks of 5": {"worker": {"block_size": 5}},
    "blocks of 16": {"worker": {"block_size": 16, "num_blocks": 12}},
    "few blocks": {"worker": {"num_blocks": 22}},
    "many blocks": {"worker": {"num_blocks": 400}},
    "a short context": {"worker": {"max_model_len": 100}},
}
"""Settings of the scheduler, and under `worker` of the worker. Most pools are too short for all."""


@pytest.mark.parametrize("case", CASES)
async def test_an_option_changes_no_token(model: Model, case: str) -> None:
    engine = one_process_engine(model, num_blocks=40, **CASES[case])
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    await engine.start()
    try:
        # At once from an empty cache, and again on what that left in it.
        for _ in range(2):
            answers = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in PROMPTS))
            assert answers == model.wanted
        hits = engine._engine.scheduler.manager.take_stats().hits
        assert (hits == 0) is (case == "no prefix caching")
    finally:
        await engine.stop()


async def test_no_role_of_the_connector_changes_a_token(model: Model) -> None:
    """One store; the producer fills it, and whoever loads finds what it saved."""
    loaded: dict[str, float] = {}
    async with running_store() as store:
        for role in ("kv_producer", "kv_consumer", "kv_both"):
            failing = "fail" if role == "kv_both" else "recompute"
            async with connected(model, store, kv_role=role, kv_load_failure_policy=failing) as engine:
                await engine.ask("first", model.wanted)
                if role == "kv_producer":
                    await until(lambda: store.app.store.stats().host_blocks > 20)
                await engine.forget()
                await engine.ask("again", model.wanted)
                loaded[role] = await engine.harness.metric("vllm:external_prefix_cache_hits_total")
                offered = await engine.harness.metric("reprise_scheduler_saves_offered_total")
                assert (offered == 0) is (role == "kv_consumer")
    assert loaded["kv_producer"] == 0
    assert loaded["kv_consumer"] > 0
    assert loaded["kv_both"] > 0


async def test_loads_that_fail_change_no_token(model: Model) -> None:
    """The store promises every block and has none."""
    async with running_store() as store, connected(model, store, kv_role="kv_consumer") as engine:
        external = engine.harness.app._external
        lookup = external.lookup

        async def promise(
            fingerprint: str, num_groups: int, hashes: list, adapter: str
        ) -> tuple[tuple[str, ...], int]:
            _, generation = await lookup(fingerprint, num_groups, hashes, adapter)
            return ("host",) * len(hashes), generation

        external.lookup = promise
        await engine.ask("first", model.wanted)
        assert await engine.harness.metric("reprise_scheduler_load_failures_total") > 0
        assert await engine.harness.metric("vllm:external_prefix_cache_hits_total") == 0
