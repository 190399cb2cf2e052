"""Whose blocks meet in Redis: those of equal models and salts, and no others (fault A2 of the field)."""

import random
from pathlib import Path

import pytest

from reprise_core.ids import BlockHash
from reprise_wire.block_codec import HEADER_NBYTES, check_payload
from reprise_wire.block_transfer import parse_redis_key
from support.external_engine import BLOCK, real_engine
from support.external_world import (
    cold_engine,
    external_tokens,
    prompts_of,
    small_real_model,
    store_address,
    stored_hashes,
)
from support.store_harness import running_store
from support.tiny_models import write_model_folder
from support.valkey_server import ValkeyProcess
from support.waiting import until

NUM_BLOCKS = 16
PROMPT = [3 + i * i % 90 for i in range(NUM_BLOCKS * BLOCK + 1)]


@pytest.fixture
def redis(tmp_path: Path):
    server = ValkeyProcess(tmp_path).start()
    yield server
    server.kill()


def keys(redis: ValkeyProcess) -> dict[str, set[BlockHash]]:
    """Hashes of blocks by fingerprint."""
    found = stored_hashes(redis)
    assert all(keyspace.adapter == "" for keyspace in found)
    return {keyspace.fingerprint: hashes for keyspace, hashes in found.items()}


def num_keys(redis: ValkeyProcess) -> int:
    return sum(len(hashes) for hashes in keys(redis).values())


async def test_a2_equal_prompts_of_two_salts_have_disjoint_keys(redis: ValkeyProcess, tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    async with cold_engine(model, redis) as one, cold_engine(model, redis) as other:
        await one.ask([PROMPT], 2, salt="t1")
        await until(lambda: num_keys(redis) == NUM_BLOCKS)
        of_t1 = next(iter(keys(redis).values()))
        for salt in ("t2", ""):
            assert external_tokens(await other.ask([PROMPT], 2, salt=salt)) == 0
        await until(lambda: num_keys(redis) == 3 * NUM_BLOCKS)
        assert len(keys(redis)) == 1, "one model"
        assert of_t1 < next(iter(keys(redis).values()))
        assert external_tokens(await other.ask([PROMPT], 2, salt="t1")) == NUM_BLOCKS * BLOCK


@pytest.mark.parametrize("difference", ["weights", "dtype", "block size"])
async def test_other_models_have_other_keys_and_find_nothing(
    redis: ValkeyProcess, tmp_path: Path, difference: str
) -> None:
    model = write_model_folder(tmp_path / "model")
    theirs, worker = model, {}
    if difference == "weights":
        theirs = write_model_folder(tmp_path / "other" / "model", seed=1)
    elif difference == "dtype":
        worker = {"dtype": "bfloat16"}
    else:
        worker = {"block_size": 2 * BLOCK}
    async with cold_engine(model, redis) as one, cold_engine(theirs, redis, worker=worker) as other:
        await one.ask([PROMPT], 2)
        await until(lambda: num_keys(redis) == NUM_BLOCKS)
        (mine,) = keys(redis)
        assert external_tokens(await other.ask([PROMPT], 2)) == 0
        await until(lambda: len(keys(redis)) == 2)
        assert {mine} < set(keys(redis))


async def test_g5_what_one_tier_served_is_right_in_the_other_too(
    redis: ValkeyProcess, tmp_path: Path
) -> None:
    """Host memory in front of Redis, blocks that come and go in both, and a pool that is too small."""
    model = small_real_model(tmp_path / "model")
    rng = random.Random(5)
    prompts = prompts_of(rng, 6, 10)
    right = model.right(prompts, 8)
    settings = {"redis_url": redis.url, "redis_timeout_s": 5.0, "capacity_bytes": 30 * 1600}
    async with running_store(**settings) as store:
        async with real_engine(model.folder, store_address(store), worker={"num_blocks": 50}) as engine:
            for count in (2, 2, 6, 6):
                answers = await engine.ask(prompts[:count], 8)
                assert [answer.token_ids for answer in answers] == right[:count]
                await engine.forget()
        await store.settled()
        assert store.metric("loads_total", tier="host", outcome="hit") > 0
        assert store.metric("loads_total", tier="external", outcome="hit") > 0
    names = [name for name in redis.command("KEYS", "*") if name.count(b":") > 2]
    assert len(names) >= 60
    for name in names:
        value = redis.command("GET", name)
        block_hash = parse_redis_key(name.decode())[2].block_hash
        check_payload(value[:HEADER_NBYTES], value[HEADER_NBYTES:], block_hash=block_hash)
