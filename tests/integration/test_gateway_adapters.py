"""Adapters through the gateway: listed, asked for by name, hashed as their engines hash them."""

import asyncio
from pathlib import Path

import pytest

from reprise.v1 import common_pb2
from reprise.v1 import engine_pb2 as pb
from reprise_core.extra_keys import HashInputs, LoraAdapter
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.none_hash import FIXED_SEED_TEXT, none_hash
from reprise_wire.hash_profiles import HashProfile
from support.fake_engine import FakeEngine
from support.gateway_system import GatewaySystem, gateway_system
from support.models import write_byte_level_model
from support.waiting import until

PROMPT = list(range(5, 105))
SQL = common_pb2.LoraAdapter(name="sql", int_id=1, path="/adapters/sql", digest="ab" * 16)
CHAT = common_pb2.LoraAdapter(name="chat", int_id=2, path="/adapters/chat", digest="cd" * 16)


def engine_with(*adapters: common_pb2.LoraAdapter, engine_id: str = "engine-0") -> FakeEngine:
    engine = FakeEngine(engine_id=engine_id, vocab_size=400)
    engine.adapters = list(adapters)
    return engine


def changed(adapter: common_pb2.LoraAdapter, **changes: str) -> common_pb2.LoraAdapter:
    other = common_pb2.LoraAdapter(**changes)
    merged = common_pb2.LoraAdapter()
    merged.CopyFrom(adapter)
    merged.MergeFrom(other)
    return merged


def hashes(engine: FakeEngine, adapter: common_pb2.LoraAdapter | None) -> bytes:
    root = none_hash(HashAlgorithm.SHA256, FIXED_SEED_TEXT)
    hasher = HashProfile("fake-profile", HashAlgorithm.SHA256, engine.block_size, root).hasher()
    lora = LoraAdapter(adapter.name, 0, adapter.path) if adapter is not None else None
    chain = hasher.chain(HashInputs(lora=lora))
    chain.append(PROMPT)
    return b"".join(chain.hashes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level_model(tmp_path_factory.mktemp("model"))


async def all_up(system: GatewaySystem) -> None:
    addresses = system.engine_addresses
    await until(lambda: all(system.metric("engine_up", engine_address=one) for one in addresses))


async def complete(system: GatewaySystem, model: str | None, **more: object) -> dict:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **more}
    answer = await system.http.post("/v1/completions", json={**body, **({"model": model} if model else {})})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_models_are_listed_with_their_adapters(model: Path) -> None:
    """Members as in the reference: an adapter's root is its path, its parent the model."""
    engines = [engine_with(SQL), engine_with(CHAT, SQL, engine_id="engine-1")]
    async with gateway_system(model, engines) as system:
        await all_up(system)
        answer = (await system.http.get("/v1/models")).json()
        cards = {card["id"]: card for card in answer["data"]}
        assert [card["id"] for card in answer["data"]] == ["smollm2", "sql", "chat"]
        assert {card["object"] for card in cards.values()} == {"model"}
        for adapter in (SQL, CHAT):
            card = cards[adapter.name]
            assert (card["root"], card["parent"], card["max_model_len"]) == (adapter.path, "smollm2", None)
            assert set(card) == set(cards["smollm2"])
        assert cards["smollm2"]["parent"] is None


async def test_a_request_for_an_adapter_goes_there_with_its_own_hashes(model: Path) -> None:
    engine = engine_with(SQL, CHAT)
    async with gateway_system(model, [engine]) as system:
        for name, adapter in (("smollm2", None), (None, None), ("sql", SQL), ("chat", CHAT)):
            answer = await complete(system, name)
            assert answer["model"] == (name or "smollm2")
            submit = engine.submits[-1]
            assert submit.HasField("lora") is (adapter is not None)
            if adapter is not None:
                asked = (submit.lora.name, submit.lora.path, submit.lora.digest)
                assert asked == (adapter.name, adapter.path, adapter.digest)
            assert submit.block_hashes.digests == hashes(engine, adapter)
        digests = [submit.block_hashes.digests for submit in engine.submits]
        assert digests[0] == digests[1]
        assert len(set(digests)) == 3
        chat = {"messages": [{"role": "user", "content": "hi"}], "model": "sql", "max_tokens": 3}
        answer = await system.http.post("/v1/chat/completions", json=chat)
        assert answer.json()["model"] == "sql"
        async with system.http.stream(
            "POST", "/v1/chat/completions", json={**chat, "stream": True}
        ) as stream:
            lines = [line async for line in stream.aiter_lines() if line.startswith("data: {")]
        assert lines
        assert all('"model":"sql"' in line.replace('": "', '":"') for line in lines)
        assert (await system.http.post("/tokenize", json={"prompt": "a", "model": "sql"})).status_code == 200


async def test_an_unknown_name_is_answered_with_all_that_are_served(model: Path) -> None:
    async with gateway_system(model, [engine_with(SQL)]) as system:
        answer = await system.http.post("/v1/completions", json={"prompt": "a", "model": "python"})
        assert answer.status_code == 404
        assert (
            answer.json()["error"]["message"] == "model: 'python' does not exist; served here: smollm2, sql"
        )


async def test_only_engines_with_the_same_content_are_asked(model: Path) -> None:
    """And one that has it under another path is given no hashes, for the path is hashed."""
    elsewhere = changed(SQL, path="/elsewhere")
    engines = [
        engine_with(SQL),
        engine_with(changed(SQL, digest="ef" * 16), engine_id="engine-1"),
        engine_with(elsewhere, engine_id="engine-2"),
        engine_with(engine_id="engine-3"),
    ]
    async with gateway_system(model, engines) as system:
        await all_up(system)
        for _ in range(8):
            await complete(system, "sql")
        assert [len(engine.submits) for engine in engines] == [4, 0, 4, 0]
        for submit in engines[0].submits:
            assert submit.block_hashes.digests == hashes(engines[0], SQL)
        for submit in engines[2].submits:
            assert (submit.lora.path, submit.HasField("block_hashes")) == ("/elsewhere", False)
        await complete(system, "smollm2")
        assert sum(len(engine.submits) for engine in engines) == 9


async def test_a_request_whose_content_is_replaced_goes_on_where_it_still_is(model: Path) -> None:
    engines = [engine_with(SQL), engine_with(SQL, engine_id="engine-1")]
    for engine in engines:
        engine.token_interval_s = 0.02
    async with gateway_system(model, engines) as system:
        await all_up(system)

        async def replace_content() -> tuple[FakeEngine, FakeEngine]:
            await until(lambda: any(engine.submits for engine in engines))
            first, second = sorted(engines, key=lambda engine: not engine.submits)
            request = first.requests[first.submits[0].request_id]
            await until(lambda: len(request.output_ids) > 5)
            first.adapters = [changed(SQL, digest="ef" * 16)]
            error = pb.ErrorDetail(kind="unavailable", message="lora.digest: other content")
            request.gone, request.finished = True, pb.Finished(reason=pb.FINISH_REASON_ERROR, error=error)
            first._wake()
            return first, second

        replacing = asyncio.ensure_future(replace_content())
        answer = await complete(system, "sql", max_tokens=30, return_token_ids=True)
        first, second = await replacing
        assert second.submits[0].num_output_tokens > 5
        right = await complete(system, "sql", max_tokens=30, return_token_ids=True)
        assert answer["choices"][0]["token_ids"] == right["choices"][0]["token_ids"]
        await all_up(system)
        for _ in range(3):
            await complete(system, "sql")
        assert len(first.submits) == 1
