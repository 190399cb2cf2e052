"""Gateway and tokenizer as processes: start in any order, drain on SIGTERM, refuse clearly."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import httpx
import pytest

from support.fake_engine import FakeEngine
from support.gateway_system import free_address
from support.models import write_byte_level_model


async def _spawn(service: str, **settings: str) -> Process:
    prefix = f"REPRISE_{service.upper()}_"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REPRISE_")}
    environment = kept | {prefix + name.upper(): value for name, value in settings.items()}
    environment |= {prefix + "METRICS_ADDRESS": free_address()}
    command = (sys.executable, "-m", f"reprise_{service}")
    return await asyncio.create_subprocess_exec(*command, env=environment, stderr=PIPE)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _until_healthy(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                if (await http.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


async def test_a_running_stream_is_finished_after_sigterm(tmp_path: Path) -> None:
    http_address, tokenizer_address, engine_address = (free_address() for _ in range(3))
    gateway = await _spawn(
        "gateway", listen_address=http_address, tokenizer_address=tokenizer_address, engines=engine_address
    )
    tokenizer = await _spawn(
        "tokenizer", listen_address=tokenizer_address, model_path=str(write_byte_level_model(tmp_path))
    )
    engine = FakeEngine(vocab_size=400, token_interval_s=0.01)
    await engine.start(engine_address)
    try:
        async with httpx.AsyncClient(base_url=f"http://{http_address}", timeout=30, trust_env=False) as http:
            await _until_healthy(http)
            body = {"prompt": "hi", "max_tokens": 100, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                gateway.send_signal(signal.SIGTERM)
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in rest[-2]
        assert await asyncio.wait_for(gateway.wait(), 10) == 0
        tokenizer.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(tokenizer.wait(), 10) == 0
    finally:
        await _end(gateway)
        await _end(tokenizer)
        await engine.stop()


@pytest.mark.parametrize(
    ("service", "settings", "message"),
    [
        ("gateway", {"engines": "nowhere"}, "REPRISE_GATEWAY_ENGINES"),
        ("gateway", {"engine": "127.0.0.1:1"}, "REPRISE_GATEWAY_ENGINE: unknown setting"),
        ("tokenizer", {}, "REPRISE_TOKENIZER_MODEL_PATH"),
        ("tokenizer", {"model_path": "/nowhere"}, "/nowhere has no tokenizer.json"),
    ],
)
async def test_a_bad_setting_ends_the_start_with_a_clear_sentence(
    service: str, settings: dict[str, str], message: str
) -> None:
    process = await _spawn(service, **settings)
    _, said = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode in (1, 2)
    assert message in said.decode()
    assert "Traceback" not in said.decode()


async def test_a_taken_port_is_named() -> None:
    engine = FakeEngine()
    address = free_address()
    await engine.start(address)
    process = await _spawn("gateway", listen_address=address)
    _, said = await asyncio.wait_for(process.communicate(), 30)
    await engine.stop()
    assert process.returncode == 1
    assert f"cannot listen on {address}" in said.decode()
