"""Two installations with adapters that share nothing but a Redis, as their users see them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from redis import Redis
from transformers import AutoConfig, AutoModelForCausalLM

from reprise_core.ids import BlockHash
from support.lora_adapters import write_adapter
from support.models import smollm2_path
from support.store_harness import hashes_by
from support.system import BLOCK_SIZE, System, start_system
from support.waiting import until_blocking

PROMPT = "".join(
    f"On day {day} the keeper saw {day * 7 % 50} ships and {day * 3 % 11} seals. " for day in range(60)
)
NUM_PROMPT_TOKENS = 640
MAX_TOKENS = 12
MODEL = "smollm2-135m-instruct"


class World(NamedTuple):
    one: System
    """Its Redis is the other's too."""
    other: System
    paths: dict[str, Path]

    def blocks(self) -> dict[str, set[BlockHash]]:
        """Hashes of blocks in Redis by their adapter's digest."""
        with Redis.from_url(self.one.endpoints["redis"]) as redis:
            return hashes_by(redis.scan_iter(), lambda keyspace, _: keyspace.adapter)


def complete(system: System, model: str, prompt: list[int]) -> tuple[list[int], dict[str, int]]:
    """Output ids, and cached tokens by their source."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    status, answer = system.post("/v1/completions", body)
    assert status == 200, answer
    assert answer["model"] == model
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_by_source"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Adapter "b" has other content in the other installation, under the same name and path."""
    folder = tmp_path_factory.mktemp("adapters")
    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        shapes = make(AutoConfig.from_pretrained(smollm2_path()))
    options: dict[str, Any] = {
        "rank": 8,
        "alpha": 16.0,
        "size": 0.08,
        "targets": ("q_proj", "v_proj", "down_proj"),
    }
    paths = {
        name: write_adapter(folder / name, shapes, seed=seed, **options) for seed, name in enumerate("ab", 1)
    }
    modules = ",".join(f"{name}={path}" for name, path in paths.items())
    settings = ("--lora-modules", modules, "--set", "scheduler.load_rule=always")
    waits = ("--set", "scheduler.max_external_wait_s=20")
    one = start_system(tmp_path_factory.mktemp("one"), *settings, *waits)
    try:
        write_adapter(paths["b"], shapes, seed=9, **options)
        redis = ("--no-redis", "--set", f"store.redis_url={one.endpoints['redis']}")
        other = start_system(tmp_path_factory.mktemp("other"), *settings, *waits, *redis)
        try:
            yield World(one, other, paths)
        finally:
            other.stop()
    finally:
        one.stop()


def test_adapters_are_listed_and_loaded_from_what_another_installation_left(world: World) -> None:
    cards = json.loads(world.one.get("/v1/models"))["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [(MODEL, None), ("a", MODEL), ("b", MODEL)]
    assert [card["root"] for card in cards[1:]] == [str(world.paths[name]) for name in "ab"]
    prompt = world.one.token_ids({"prompt": PROMPT})[:NUM_PROMPT_TOKENS]
    assert len(prompt) == NUM_PROMPT_TOKENS
    num_full = NUM_PROMPT_TOKENS // BLOCK_SIZE
    outputs = {}
    for name in (MODEL, "a", "b"):
        outputs[name], sources = complete(world.one, name, prompt)
        assert sum(sources.values()) == 0, name
    assert len({tuple(output) for output in outputs.values()}) == 3
    until_blocking(lambda: sum(map(len, world.blocks().values())) >= 3 * num_full, 60)
    kept = world.blocks()
    assert len(kept) == 3
    assert sum(map(len, kept.values())) == len(set().union(*kept.values()))
    for name in (MODEL, "a"):
        output, sources = complete(world.other, name, prompt)
        assert output == outputs[name]
        assert sources["external"] >= 0.95 * num_full * BLOCK_SIZE, name
        assert sources["device"] == sources["host"] == 0
    output, sources = complete(world.other, "b", prompt)
    assert sum(sources.values()) == 0, "other content"
    assert output != outputs["b"]
    until_blocking(lambda: len(world.blocks()) == 4, 60)
    assert world.one.reset(external=True, running=True)["success"]
    for name in (MODEL, "a", "b"):
        _, sources = complete(world.one, name, prompt)
        assert sum(sources.values()) == 0, name
