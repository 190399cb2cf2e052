"""What a preempted request had computed comes back from Redis, however short the pool and slow the saves."""

import asyncio
import random
from pathlib import Path

import pytest

from support.external_engine import BLOCK, real_engine
from support.external_world import Model, prompts_of, small_real_model, store_address
from support.store_harness import running_store
from support.valkey_server import ValkeyProcess
from support.waiting import until

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return small_real_model(tmp_path_factory.mktemp("preempted") / "model")


@pytest.fixture
def redis(tmp_path: Path):
    server = ValkeyProcess(tmp_path).start()
    yield server
    server.kill()


@pytest.mark.parametrize(
    ("num_blocks", "prompt_blocks", "count", "slow_s"),
    [(41, 6, 5, 0.0), (41, 6, 5, 0.005), (9, 2, 2, 0.01)],
    ids=["as it comes", "slow saves", "eight blocks"],
)
async def test_preempted_blocks_come_back(
    model: Model,
    redis: ValkeyProcess,
    num_blocks: int,
    prompt_blocks: int,
    count: int,
    slow_s: float,
) -> None:
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    # A request alone must fit.
    num_tokens = min(NUM_TOKENS, (num_blocks - 1 - prompt_blocks) * BLOCK - 2)
    async with running_store(redis_url=redis.url, redis_timeout_s=5.0, capacity_bytes=0) as store:
        save = store.app.store.save

        async def slow_save(*arguments: object) -> list[bool]:
            await asyncio.sleep(slow_s)
            return await save(*arguments)  # type: ignore[arg-type]

        store.app.store.save = slow_save  # type: ignore[method-assign]
        worker = {"num_blocks": num_blocks, "save_staging_bytes": 64 * 1024}
        # Every block that is preempted is soon given to another, so only Redis still has it.
        async with real_engine(model.folder, store_address(store), worker=worker) as engine:
            for round_ in range(60):
                prompts = prompts_of(rng, count, prompt_blocks)
                answers = await engine.ask(prompts, num_tokens)
                assert [answer.token_ids for answer in answers] == model.right(prompts, num_tokens)
                loaded = engine.worker_metric("loads_total")
                preempted = await engine.harness.metric("vllm:num_preemptions_total")
                if round_ >= 4 and preempted and (loaded or num_blocks < 10):
                    break
            assert preempted > 0
            assert loaded > 0 or num_blocks < 10, "nothing came back from Redis"
            print(f"{preempted:.0f} preemptions, {loaded:.0f} blocks came back from Redis")
            # All prompts were new: whatever was loaded had been saved by a request that was preempted.
            assert await engine.harness.metric("vllm:external_prefix_cache_hits_total") == 0
            await until(lambda: engine.idle)
            engine.check_nothing_leaked()
