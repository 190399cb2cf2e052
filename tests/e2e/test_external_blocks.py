"""Two installations that share nothing but a Redis: what one computes, the other finds there."""

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from redis import Redis

from reprise.v1 import engine_pb2 as pb
from reprise_core.ids import BlockHash
from reprise_scheduler.settings import SchedulerSettings
from reprise_wire.block_transfer import parse_redis_key
from support.scheduler_harness import GatewaySide, SchedulerHarness
from support.system import BLOCK_SIZE, System, start_system
from support.waiting import until_blocking

LONG = "".join(
    f"Entry {number}: on day {number} the keeper saw {number * 7 % 50} ships and {number * 3 % 11} seals. "
    for number in range(200)
)
NUM_PROMPT_TOKENS = 2048
MAX_TOKENS = 12
SAVED_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Pair:
    one: System
    """Its Redis is everybody's."""
    other: System
    """Two engines behind one gateway, which share a store."""

    def block_keys(self) -> list[str]:
        with Redis.from_url(self.one.endpoints["redis"]) as redis:
            return [name.decode() for name in redis.scan_iter() if name.count(b":") > 2]

    def blocks(self) -> set[BlockHash]:
        return {parse_redis_key(name)[2].block_hash for name in self.block_keys()}

    def until_saved(self, num_blocks: int, *, besides: set[BlockHash]) -> None:
        """Redis may not answer one's store in time for a while; what is saved meanwhile waits for it.
        `besides`: what was there before, of which a reset's sweep may still delete some."""
        until_blocking(lambda: len(self.blocks() - besides) >= num_blocks, SAVED_TIMEOUT_S)


@pytest.fixture(scope="module")
def pair(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    settings = {
        "store.redis_url": system.endpoints["redis"],
        # What is found is waited for and loaded, however busy this machine is.
        "scheduler.load_rule": "always",
        "scheduler.max_external_wait_s": "60",
        "scheduler.worker_timeout_s": "60",
        "store.redis_timeout_s": "20",
        "worker.load_timeout_s": "60",
    }
    arguments = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    other = start_system(
        tmp_path_factory.mktemp("other"),
        *("--no-redis", "--engines", "2", "--num-gpu-blocks-override", "400", *arguments),
    )
    try:
        reset(system)
        yield Pair(system, other)
    finally:
        other.stop()


def reset(system: System) -> None:
    """It fails, and drops nothing, where Redis does not answer in time on a busy machine."""
    until_blocking(lambda: bool(system.reset(external=True)["success"]), SAVED_TIMEOUT_S)


def complete(system: System, prompt: list[int], **more: object) -> tuple[list[int], dict[str, int]]:
    """Output ids, and cached tokens by their source."""
    body = {
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    status, answer = system.post("/v1/completions", body)
    assert status == 200, answer
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == sum(details["cached_by_source"].values())
    return answer["choices"][0]["token_ids"], details["cached_by_source"]


@pytest.fixture(scope="module")
def prompt(pair: Pair) -> list[int]:
    tokens = pair.one.token_ids({"prompt": LONG})
    assert len(tokens) > NUM_PROMPT_TOKENS
    return tokens[:NUM_PROMPT_TOKENS]


def test_a_cold_engine_answers_from_what_another_left_in_redis(pair: Pair, prompt: list[int]) -> None:
    num_full = NUM_PROMPT_TOKENS // BLOCK_SIZE
    before = pair.blocks()
    output, sources = complete(pair.one, prompt)
    assert sum(sources.values()) == 0
    pair.until_saved(num_full, besides=before)
    same, sources = complete(pair.other, prompt)
    assert same == output
    assert sources["device"] == sources["host"] == 0
    assert sources["external"] >= 0.95 * num_full * BLOCK_SIZE
    assert pair.other.metric("vllm:external_prefix_cache_hits_total") == sources["external"]


def test_a2_salted_prompts_meet_nobody_elses_blocks(pair: Pair, prompt: list[int]) -> None:
    short = prompt[100:400]
    num_full = len(short) // BLOCK_SIZE
    kept: list[set[BlockHash]] = []
    outputs = []
    for system, salt in ((pair.one, "t1"), (pair.other, "t2"), (pair.one, None)):
        before = pair.blocks()
        output, sources = complete(system, short, **({"cache_salt": salt} if salt else {}))
        assert sum(sources.values()) == 0, salt
        pair.until_saved(num_full, besides=before)
        kept.append(pair.blocks() - before)
        outputs.append(output)
    assert all(len(keys) >= num_full for keys in kept)
    assert outputs[0] == outputs[1] == outputs[2]
    _, sources = complete(pair.other, short, cache_salt="t1")
    assert sources["external"] == (len(short) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_a_reset_through_the_gateway_reaches_every_engine_and_every_tier(
    pair: Pair, prompt: list[int]
) -> None:
    short = prompt[:200]
    engines = [engine["grpc"] for engine in pair.other.endpoints["engines"]]
    assert len(engines) == 2
    for _ in range(2):
        warm = [asyncio.run(ask_directly(address, short)) for address in engines]
    assert all(usage.device_tokens for usage in warm)
    complete(pair.one, short)
    answer = pair.other.reset(external=True)
    assert answer["success"]
    assert [(one["engine_id"], one["device"], one["external"]) for one in answer["engines"]] == [
        ("engine-0", True, True),
        ("engine-1", True, True),
    ]
    # The other installation was not asked, so it is warm; but it does not bring the old blocks back.
    _, sources = complete(pair.one, short)
    assert sources["device"] > 0
    first, second = (asyncio.run(ask_directly(address, short)) for address in engines)
    assert (first.device_tokens, first.host_tokens, first.external_tokens) == (0, 0, 0)
    assert second.device_tokens == 0, "the others' tiers may have what the first has just computed"
    reset(pair.one)
    _, sources = complete(pair.one, short)
    assert sum(sources.values()) == 0
    until_blocking(lambda: len({name.split(":")[1] for name in pair.block_keys()}) == 1, SAVED_TIMEOUT_S)


async def ask_directly(address: str, prompt: list[int]) -> pb.PromptUsage:
    """An engine of one's choice, past the gateway."""
    harness = SchedulerHarness(None, SchedulerSettings(listen_address=address))  # type: ignore[arg-type]
    try:
        harness.info = await harness.stub.GetInfo(pb.GetInfoRequest())
        gateway = await GatewaySide(harness, gateway_id="direct").attach()
        gateway.submit(name := secrets.token_hex(4), prompt, max_tokens=2)
        await gateway.ended(name, timeout_s=120)
        await gateway.cut()
        usage = gateway.requests[name].usage
        assert usage is not None
        return usage
    finally:
        await harness.channel.close()
