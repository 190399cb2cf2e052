"""A caller's time limit and an engine's back-pressure, as HTTP clients see them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from reprise.v1 import engine_pb2 as pb
from support.fake_engine import FakeEngine
from support.gateway_system import GatewaySystem, gateway_system
from support.models import write_byte_level_model
from support.waiting import until

BODY = {"prompt": "some words", "max_tokens": 200, "ignore_eos": True}


@pytest_asyncio.fixture
async def system(tmp_path: Path) -> AsyncIterator[GatewaySystem]:
    engine = FakeEngine(vocab_size=400, max_model_len=300, block_size=4)
    async with gateway_system(write_byte_level_model(tmp_path), [engine]) as running:
        yield running


async def test_a_refusal_says_when_to_come_again_in_whole_seconds(system: GatewaySystem) -> None:
    system.engines[0].refuse = pb.ErrorDetail(kind="exhausted", message="9 wait", retry_after_s=7.2)
    response = await system.http.post("/v1/completions", json=BODY)
    assert response.status_code == 429
    assert response.headers["Retry-After"] == "8"
    assert response.json()["error"]["message"] == "9 wait"
    system.engines[0].refuse = pb.ErrorDetail(kind="exhausted", message="9 wait", retry_after_s=0.01)
    response = await system.http.post("/v1/completions", json=BODY)
    assert response.headers["Retry-After"] == "1"


async def test_an_answer_that_takes_too_long_is_a_504_and_leaves_the_engine(system: GatewaySystem) -> None:
    engine = system.engines[0]
    engine.hold.clear()
    response = await system.http.post("/v1/completions", json=BODY, headers={"X-Request-Timeout-S": "0.3"})
    assert response.status_code == 504
    assert response.json()["error"] == {
        "message": "not finished within 0.3 s",
        "type": "GatewayTimeoutError",
        "param": None,
        "code": 504,
    }
    assert 0 < engine.submits[0].timeout_s <= 0.3
    await until(lambda: not engine.requests)
    assert system.metric("deadlines_exceeded_total") == 1
    assert system.metric("inflight_sequences") == 0


async def test_a_stream_that_has_begun_ends_with_the_error_as_an_event(system: GatewaySystem) -> None:
    engine = system.engines[0]
    engine.token_interval_s = 0.05
    response = await system.http.post(
        "/v1/completions", json={**BODY, "stream": True}, headers={"X-Request-Timeout-S": "0.5"}
    )
    assert response.status_code == 200
    events = [line for line in response.text.split("\n\n") if line]
    assert '"code":504' in events[-2]
    assert events[-1] == "data: [DONE]"
    await until(lambda: not engine.requests)


async def test_an_answer_in_time_is_not_touched(system: GatewaySystem) -> None:
    short = {**BODY, "max_tokens": 3}
    response = await system.http.post("/v1/completions", json=short, headers={"X-Request-Timeout-S": "30"})
    assert response.status_code == 200
    assert system.engines[0].submits[0].timeout_s == pytest.approx(30, abs=5)
    plain = await system.http.post("/v1/completions", json=short)
    assert plain.status_code == 200
    assert system.engines[0].submits[1].timeout_s == 0
    assert system.metric("deadlines_exceeded_total") == 0


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "1e9"])
async def test_a_time_that_is_none_is_refused_by_name(system: GatewaySystem, value: str) -> None:
    response = await system.http.post("/v1/completions", json=BODY, headers={"X-Request-Timeout-S": value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "X-Request-Timeout-S"
    assert value in error["message"]
    assert not system.engines[0].submits


async def test_no_engine_within_the_time_is_a_504_too(system: GatewaySystem) -> None:
    await system.engines[0].stop()
    address = system.engine_addresses[0]
    await until(lambda: system.metric("engine_up", engine_address=address) == 0)
    response = await system.http.post("/v1/completions", json=BODY, headers={"X-Request-Timeout-S": "0.3"})
    assert response.status_code == 504


async def test_a_tokenizer_that_is_away_is_waited_for_no_longer_than_the_time(system: GatewaySystem) -> None:
    await system.tokenizer.stop()
    response = await system.http.post("/v1/completions", json=BODY, headers={"X-Request-Timeout-S": "0.3"})
    assert response.status_code == 504
    assert response.json()["error"]["message"] == "not finished within 0.3 s"
    assert not system.engines[0].submits
    assert system.metric("deadlines_exceeded_total") == 1
    await system.tokenizer.start()


async def test_a_begun_answer_waits_for_a_lost_engine_no_longer_than_the_time(system: GatewaySystem) -> None:
    """Far below `failover_wait_s`; it ends once, and nothing of it waits any more."""
    engine = system.engines[0]
    engine.token_interval_s = 0.05
    answer = asyncio.ensure_future(
        system.http.post(
            "/v1/completions", json={**BODY, "stream": True}, headers={"X-Request-Timeout-S": "2"}
        )
    )
    await until(lambda: bool(engine.submits) and system.metric("inflight_sequences") == 1)
    await asyncio.sleep(0.3)
    await engine.stop()
    events = [line for line in (await answer).text.split("\n\n") if line]
    assert len(events) > 3
    assert sum('"code":504' in event for event in events) == 1
    assert '"code":504' in events[-2]
    assert events[-1] == "data: [DONE]"
    assert system.metric("waiting_sequences") == 0
    assert system.metric("inflight_sequences") == 0
    assert system.metric("deadlines_exceeded_total") == 1
