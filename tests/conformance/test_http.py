"""The recorded HTTP answers of the reference, line by line, against gateway, real tokenizer and fake engine.

Compared: status, error type, param and code, shapes and members of bodies and of every streamed chunk,
token ids and counts of prompts. Not compared: generated text and what follows from it (which chunks,
finish and stop reasons, completion tokens), since the engine here has no model.

Left out, and why:
* `cache_step`, `reset_while_busy`: counters and events of a whole system with a model; tests/e2e has those.
* /kv_event_sources: names the publishers' sockets, which the gateway does not know.
* token_strs of /tokenize: not honoured, so a 400 that names the field (checked below).
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.fake_engine import FakeEngine
from support.gateway_system import GatewaySystem, gateway_system
from support.models import smollm2_path

VECTORS = Path(__file__).parent / "vectors" / "http.jsonl"
REFUSED = {"http-023": "return_token_strs"}
NO_ROUTE = {"http-005"}

Row = dict[str, Any]


def _rows(kind: str) -> list[Row]:
    rows = [json.loads(line) for line in VECTORS.read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind and row["id"] not in NO_ROUTE]


def _name(row: Row) -> str:
    return f"{row['id']}-{row.get('name', row['path'])}".replace(" ", "_")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system() -> AsyncIterator[GatewaySystem]:
    async with gateway_system(smollm2_path(), [FakeEngine()], any_role=True) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("row", _rows("http"), ids=_name)
async def test_answer(system: GatewaySystem, row: Row) -> None:
    response = await system.http.request(
        row["method"], row["path"], content=_content(row), headers=_headers(row)
    )
    if row["id"] in REFUSED:
        assert response.status_code == 400
        assert response.json()["error"]["param"] == REFUSED[row["id"]]
        return
    assert response.status_code == row["status"], response.text
    if row.get("empty_body"):
        assert response.content == b""
        return
    assert response.headers["content-type"] == row["content_type"]
    if row["status"] >= 400:
        _check_error(row, response)
    elif "stream" in row:
        _check_stream(row["stream"], _events(response.text))
    else:
        _check_body(row, response.json())


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("row", _rows("reset"), ids=_name)
async def test_reset(system: GatewaySystem, row: Row) -> None:
    engine = system.engines[0]
    engine.reset_answer.external = True
    response = await system.http.post(row["path"])
    assert response.status_code == row["status"]
    assert response.json()["success"] is row["body"]["success"]
    assert response.json()["engines"] == [{"engine_id": "engine-0", "device": True, "external": True}]


def _content(row: Row) -> bytes | None:
    if "raw_request_body" in row:
        return row["raw_request_body"].encode()
    if "request" not in row:
        return None
    request = dict(row["request"])
    prompt = request.get("prompt")
    if isinstance(prompt, str) and prompt.startswith("<") and " x " in prompt:
        count, _, token = prompt.strip("<>").partition(" x ")
        request["prompt"] = [int(token)] * int(count)
    if request.get("messages") == "<one user message, 3000 words>":
        request["messages"] = [{"role": "user", "content": "word " * 3000}]
    return json.dumps(request).encode()


def _headers(row: Row) -> dict[str, str]:
    return {"Content-Type": "application/json", **row.get("request_headers", {})}


def _check_error(row: Row, response: Any) -> None:
    body = response.json()
    if "detail" in row:
        assert body == {"detail": row["detail"]}
        if "allow" in row:
            assert response.headers["allow"] == row["allow"]
        return
    error = body["error"]
    assert error["message"]
    assert {**error, "message": "<text>"} == row["error"]
    assert list(error) == list(row["error"])


def _check_body(row: Row, body: Any) -> None:
    expected = row["body"]
    if row["path"] in ("/tokenize", "/detokenize", "/load"):
        # This request itself is one that is worked on.
        assert body == expected
        return
    _check_members(expected, body, "body")
    if "usage" in expected:
        assert body["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        assert len(body["choices"]) == len(expected["choices"])
        _check_id(row, body)
    if row.get("request", {}).get("return_token_ids"):
        assert body["choices"][0]["prompt_token_ids"] == expected["choices"][0]["prompt_token_ids"]


def _check_id(row: Row, body: Any) -> None:
    prefix = "chatcmpl-" if "chat" in row["path"] else "cmpl-"
    given = row.get("request_headers", {}).get("X-Request-Id")
    assert body["id"] == prefix + given if given else body["id"].startswith(prefix)


def _check_stream(expected: list[Any], events: list[Any]) -> None:
    """Every chunk of ours has the members of one of theirs; the first and the last ones correspond."""
    assert events[-1] == expected[-1] == "[DONE]"
    _check_members(expected[0], events[0], "first")
    # An answer that came in one piece has a chunk that is first and last at once.
    if events[-2] is not events[0]:
        _check_members(expected[-2], events[-2], "last")
    assert set(expected[-2]) == set(events[-2])
    shapes = {_shape(chunk) for chunk in expected[:-1]}
    for event in events[:-1]:
        assert _shape(event) in shapes or len(events) < 4


def _shape(chunk: Any) -> tuple[Any, ...]:
    choices = [tuple(sorted(choice)) for choice in chunk["choices"]]
    return (tuple(sorted(chunk)), tuple(choices))


def _check_members(expected: Any, actual: Any, place: str) -> None:
    """Same members in the same order, ours may have more; same kinds of values."""
    if place.endswith(".top_logprobs"):
        # Maps from texts, which are the model's.
        assert [{*map(type, top.values())} for top in actual] == [{float}] * len(expected), place
    elif isinstance(expected, dict):
        assert isinstance(actual, dict), place
        assert [key for key in actual if key in expected] == list(expected), place
        for key, value in expected.items():
            _check_members(value, actual[key], f"{place}.{key}")
    elif isinstance(expected, list):
        assert isinstance(actual, list), place
        for i, (one, other) in enumerate(zip(expected, actual, strict=False)):
            _check_members(one, other, f"{place}[{i}]")
    elif expected is None and not place.endswith(("stop_reason", "finish_reason")):
        assert actual is None, place


def _events(text: str) -> list[Any]:
    datas = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]
