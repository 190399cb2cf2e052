"""Peers that break, restart or stay away; clients that leave; limits. Nobody sees a wrong text."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from reprise.v1 import engine_pb2 as pb
from support.fake_engine import FakeEngine, counting_tokens
from support.gateway_system import GatewaySystem, gateway_system, make_tokenizer
from support.models import write_byte_level_model
from support.waiting import until

PROMPT = [5, 6, 7, 8, 9, 10]


def _engine(engine_id: str = "engine-0", **settings: Any) -> FakeEngine:
    settings = {
        "vocab_size": 400,
        "max_model_len": 300,
        "block_size": 4,
        "token_interval_s": 0.004,
        **settings,
    }
    return FakeEngine(engine_id=engine_id, **settings)


@asynccontextmanager
async def _system(folder: Path, *engines: FakeEngine, **settings: Any) -> AsyncIterator[GatewaySystem]:
    async with gateway_system(write_byte_level_model(folder), engines or [_engine()], **settings) as system:
        yield system


def _expected(folder: Path, num_tokens: int) -> str:
    ids = list(PROMPT)
    for index in range(num_tokens):
        ids.append(counting_tokens(ids, index))
    text: str = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids[len(PROMPT) :])
    return text


async def _complete(system: GatewaySystem, num_tokens: int = 60, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": num_tokens, **fields}
    return await system.http.post("/v1/completions", json=body)


async def _stream_text(system: GatewaySystem, num_tokens: int = 60) -> tuple[str, dict[str, Any] | None]:
    """The text, and the error that ended it."""
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "stream": True}
    text = ""
    async with system.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                return text, chunk["error"]
            text += chunk["choices"][0]["text"]
    return text, None


def _begun(engine: FakeEngine, num_tokens: int = 8) -> bool:
    return any(len(request.output_ids) >= num_tokens for request in engine.requests.values())


class TestEngineStream:
    async def test_a_break_is_bridged_by_attaching_again(self, tmp_path: Path) -> None:
        async with _system(tmp_path) as system:
            (engine,) = system.engines
            running = asyncio.ensure_future(_stream_text(system))
            await until(lambda: _begun(engine))
            engine.break_streams()
            assert await running == (_expected(tmp_path, 60), None)
            assert engine.num_attached == 2
            assert len(engine.submits) == 1
            assert system.metric("stream_breaks_total", peer="engine") == 1

    async def test_a_restarted_engine_goes_on_from_the_tokens_so_far(self, tmp_path: Path) -> None:
        async with _system(tmp_path) as system:
            (engine,) = system.engines
            running = asyncio.ensure_future(_stream_text(system))
            await until(lambda: _begun(engine))
            engine.forget_requests()
            assert await running == (_expected(tmp_path, 60), None)
            assert len(engine.submits) == 2
            assert engine.submits[1].num_output_tokens > 0
            assert system.metric("resubmissions_total") == 1

    async def test_another_engine_takes_over_after_the_grace(self, tmp_path: Path) -> None:
        async with _system(tmp_path, _engine("a"), _engine("b")) as system:
            running = asyncio.ensure_future(_stream_text(system))
            await until(lambda: any(_begun(engine) for engine in system.engines))
            first, second = sorted(system.engines, key=lambda engine: -len(engine.submits))
            await first.stop()
            assert await running == (_expected(tmp_path, 60), None)
            assert len(second.submits) == 1
            assert second.submits[0].num_output_tokens > 0

    async def test_one_not_yet_begun_goes_elsewhere_at_once(self, tmp_path: Path) -> None:
        engines = [_engine("a"), _engine("b")]
        async with _system(tmp_path, *engines, stream_grace_s=60.0) as system:
            for engine in engines:
                engine.hold.clear()
            running = asyncio.ensure_future(_complete(system, 5))
            await until(lambda: any(engine.submits for engine in engines))
            first, second = sorted(engines, key=lambda engine: -len(engine.submits))
            second.hold.set()
            await first.stop()
            async with asyncio.timeout(3):
                response = await running
            assert response.json()["choices"][0]["text"] == _expected(tmp_path, 5)

    async def test_with_no_engine_left_there_is_a_clear_error(self, tmp_path: Path) -> None:
        async with _system(tmp_path, failover_wait_s=0.4, stream_grace_s=0.2) as system:
            (engine,) = system.engines
            streaming = asyncio.ensure_future(_stream_text(system, 200))
            plain = asyncio.ensure_future(_complete(system, 200))
            await until(lambda: len(engine.requests) == 2 and _begun(engine))
            await engine.stop()
            text, error = await streaming
            assert error is not None
            assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
            assert "no engine can serve; waited 0.4 s" in error["message"]
            assert _expected(tmp_path, 200).startswith(text)
            response = await plain
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert (await system.http.get("/health")).status_code == 503
            assert not system.gateway.readiness.ready
            assert system.metric("waiting_sequences") == 0

    async def test_a_request_waits_for_an_engine_that_comes_back(self, tmp_path: Path) -> None:
        async with _system(tmp_path) as system:
            (engine,) = system.engines
            await engine.stop()
            await until(lambda: not system.gateway.readiness.ready)
            running = asyncio.ensure_future(_complete(system, 5))
            await until(lambda: system.metric("waiting_sequences") == 1)
            await engine.start(system.engine_addresses[0])
            assert (await running).json()["choices"][0]["text"] == _expected(tmp_path, 5)

    async def test_an_engine_without_a_worker_gets_nothing(self, tmp_path: Path) -> None:
        engines = [_engine("a"), _engine("b")]
        async with _system(tmp_path, *engines) as system:
            engines[0].has_worker = False
            await until(lambda: system.metric("engine_up", engine_address=system.engine_addresses[0]) == 0)
            for _ in range(4):
                assert (await _complete(system, 2)).status_code == 200
            assert (len(engines[0].submits), len(engines[1].submits)) == (0, 4)
            assert (await system.http.get("/health")).status_code == 200

    async def test_requests_spread_over_engines(self, tmp_path: Path) -> None:
        engines = [_engine("a"), _engine("b")]
        async with _system(tmp_path, *engines) as system:
            await asyncio.gather(*(_complete(system, 20) for _ in range(10)))
            assert [len(engine.submits) for engine in engines] == [5, 5]

    @pytest.mark.parametrize(
        ("kind", "status"), [("exhausted", 429), ("invalid", 400), ("deadline", 504), ("internal", 500)]
    )
    async def test_refusals_of_the_engine(self, tmp_path: Path, kind: str, status: int) -> None:
        engine = _engine()
        engine.refuse = pb.ErrorDetail(kind=kind, message="the queue of 4 is full", retry_after_s=7)
        async with _system(tmp_path, engine) as system:
            for stream in (False, True):
                response = await _complete(system, stream=stream)
                assert response.status_code == status
                assert "the queue of 4 is full" in response.json()["error"]["message"]
                assert response.headers["retry-after"] == "7"
            assert system.metric("inflight_sequences") == 0

    async def test_an_engine_that_loses_it_again_and_again(self, tmp_path: Path) -> None:
        engine = _engine()
        engine.refuse = pb.ErrorDetail(kind="not_found", message="unknown request")
        async with _system(tmp_path, engine, max_resubmissions=3) as system:
            response = await _complete(system)
            assert response.status_code == 503
            assert "lost this request 4 times" in response.json()["error"]["message"]
            assert len(engine.submits) == 4


class TestTokenizer:
    async def test_a_lost_tokenizer_is_given_all_tokens_again(self, tmp_path: Path) -> None:
        async with _system(tmp_path) as system:
            (engine,) = system.engines
            running = asyncio.ensure_future(_stream_text(system, 120))
            await until(lambda: _begun(engine))
            await system.tokenizer.stop()
            await until(lambda: _begun(engine, 60))
            system.tokenizer = make_tokenizer(tmp_path, system.tokenizer_address)
            await system.tokenizer.start()
            assert await running == (_expected(tmp_path, 120), None)
            assert system.metric("stream_breaks_total", peer="tokenizer") == 1

    async def test_a_prompt_waits_for_it(self, tmp_path: Path) -> None:
        async with _system(tmp_path) as system:
            await system.tokenizer.stop()
            running = asyncio.ensure_future(_complete(system, 5))
            await asyncio.sleep(0.2)
            assert (await system.http.get("/health")).status_code == 503
            system.tokenizer = make_tokenizer(tmp_path, system.tokenizer_address)
            await system.tokenizer.start()
            assert (await running).json()["choices"][0]["text"] == _expected(tmp_path, 5)

    async def test_without_it_running_requests_fail_in_time(self, tmp_path: Path) -> None:
        async with _system(tmp_path, failover_wait_s=0.4) as system:
            (engine,) = system.engines
            running = asyncio.ensure_future(_stream_text(system, 290))
            await until(lambda: _begun(engine))
            await system.tokenizer.stop()
            _, error = await running
            assert error is not None
            assert "the tokenizer was away for 0.4 s" in error["message"]
            await until(lambda: bool(engine.aborts))


class TestClients:
    async def test_one_that_leaves_a_stream_is_aborted(self, tmp_path: Path) -> None:
        async with _system(tmp_path) as system:
            (engine,) = system.engines
            body = {"prompt": PROMPT, "max_tokens": 290, "stream": True}
            async with system.http.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_lines())
            await until(lambda: bool(engine.aborts))
            await until(lambda: system.metric("inflight_sequences") == 0)
            assert engine.requests == {}
            assert system.metric("client_disconnects_total") == 1
            assert system.tokenizer.registry.get_sample_value("reprise_tokenizer_stream_requests") == 0

    async def test_one_that_leaves_a_plain_request_is_aborted(self, tmp_path: Path) -> None:
        async with _system(tmp_path) as system:
            (engine,) = system.engines
            running = asyncio.ensure_future(_complete(system, 290))
            await until(lambda: _begun(engine))
            running.cancel()
            await until(lambda: bool(engine.aborts))
            await until(lambda: system.metric("inflight_sequences") == 0)
            assert system.metric("requests_total", route="/v1/completions", status="499") == 1

    async def test_one_that_leaves_while_it_waits_for_an_engine(self, tmp_path: Path) -> None:
        async with _system(tmp_path) as system:
            (engine,) = system.engines
            await engine.stop()
            await until(lambda: not system.gateway.readiness.ready)
            for stream in (False, True):
                running = asyncio.ensure_future(_complete(system, 5, stream=stream))
                await until(lambda: system.metric("waiting_sequences") == 1)
                running.cancel()
                await until(lambda: system.metric("waiting_sequences") == 0)
            assert system.metric("client_disconnects_total") == 2
            assert system.metric("inflight_sequences") == 0


class TestLimits:
    async def test_a_body_that_is_too_large(self, tmp_path: Path) -> None:
        async with _system(tmp_path, max_body_bytes=1000) as system:
            response = await _complete(system, user="x" * 1000)
            assert response.status_code == 413

            async def pieces() -> AsyncIterator[bytes]:
                for _ in range(200):
                    yield b" " * 10

            headers = {"content-type": "application/json"}
            response = await system.http.post("/v1/completions", content=pieces(), headers=headers)
            assert response.status_code == 413
            assert "at most 1000 bytes" in response.json()["error"]["message"]
            assert system.metric("refused_requests_total", limit="body_bytes") == 2

    async def test_too_many_requests_and_sequences(self, tmp_path: Path) -> None:
        async with _system(tmp_path, max_inflight_requests=2, max_inflight_sequences=3) as system:
            running = asyncio.ensure_future(_complete(system, 250))
            await until(lambda: system.metric("inflight_sequences") == 1)
            response = await _complete(system, 5, n=3)
            assert response.status_code == 429
            assert "limit of 3" in response.json()["error"]["message"]
            other = asyncio.ensure_future(_complete(system, 250))
            await until(lambda: system.metric("inflight_sequences") == 2)
            response = await _complete(system, 5)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["type"] == "RateLimitError"
            assert (await system.http.get("/health")).status_code == 200
            assert [(await one).status_code for one in (running, other)] == [200, 200]
            for limit in ("inflight_requests", "inflight_sequences"):
                assert system.metric("refused_requests_total", limit=limit) == 1


class TestAdmin:
    async def test_reset_goes_to_every_engine_and_tells_of_each(self, tmp_path: Path) -> None:
        engines = [_engine("a"), _engine("b")]
        engines[1].reset_answer = pb.ResetPrefixCacheResponse(device=True, external=False)
        async with _system(tmp_path, *engines) as system:
            path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
            answer = (await system.http.post(path)).json()
            assert answer == {
                "success": False,
                "engines": [
                    {"engine_id": "a", "device": True, "external": None},
                    {"engine_id": "b", "device": True, "external": False},
                ],
            }
            assert all(engine.resets[0].reset_running_requests for engine in engines)
            await engines[1].stop()
            answer = (await system.http.post("/reset_prefix_cache")).json()
            assert not answer["success"]
            assert "error" in answer["engines"][1]

    async def test_reset_is_for_developers(self, tmp_path: Path) -> None:
        async with _system(tmp_path, dev_mode=False) as system:
            assert (await system.http.post("/reset_prefix_cache")).status_code == 404

    async def test_metrics_of_all_engines_and_our_own(self, tmp_path: Path) -> None:
        engines = [_engine("a"), _engine("b")]
        async with _system(tmp_path, *engines) as system:
            await _complete(system, 3, no_such_field=1)
            await system.http.get("/nowhere")
            text = (await system.http.get("/metrics")).text
            assert 'vllm:num_requests_running{engine="a"} 0.0' in text
            assert 'vllm:num_requests_running{engine="b"} 0.0' in text
            assert text.count("# TYPE vllm:num_requests_running gauge") == 1
            assert 'reprise_gateway_requests_total{route="/v1/completions",status="200"} 1.0' in text
            assert 'reprise_gateway_requests_total{route="other",status="404"} 1.0' in text
            assert "reprise_gateway_unknown_fields_total 1.0" in text
            assert "reprise_gateway_time_to_first_token_seconds_count 1.0" in text


async def test_services_may_start_in_any_order(tmp_path: Path) -> None:
    engine = _engine()
    engine.has_worker = False
    model = write_byte_level_model(tmp_path)
    async with gateway_system(model, [engine], wait_ready=False) as system:
        waiting = asyncio.ensure_future(_complete(system, 5))
        await until(lambda: "no worker" in system.gateway.readiness.waiting_for().get("engine", ""))
        response = await system.http.get("/health")
        assert response.status_code == 503
        assert "no worker has registered" in response.json()["error"]["message"]
        engine.has_worker = True
        assert (await waiting).status_code == 200
