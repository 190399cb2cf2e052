"""Pins and tenants over HTTP: fields, the trusted header, and the developers' routes."""

from pathlib import Path
from typing import Any

import pytest

from reprise.v1 import engine_pb2 as pb
from support.fake_engine import FakeEngine
from support.gateway_system import gateway_system
from support.models import write_byte_level_model

PROMPT = [5, 6, 7, 8, 9, 10]


def _engine(engine_id: str) -> FakeEngine:
    return FakeEngine(engine_id=engine_id, vocab_size=400, max_model_len=300, block_size=4)


def _body(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 2, **fields}


async def test_fields_and_the_trusted_header_reach_the_engine(tmp_path: Path) -> None:
    engine = _engine("a")
    async with gateway_system(write_byte_level_model(tmp_path), [engine], trust_tenant_header=True) as system:
        url, headers = "/v1/completions", {"X-Tenant-Id": "acme"}
        body = _body(cache_pin=True, cache_pin_ttl_s=60, n=2, temperature=1)
        assert (await system.http.post(url, json=body, headers=headers)).status_code == 200
        assert (await system.http.post(url, json=_body())).status_code == 200
        pinned, other, plain = engine.submits
        assert (pinned.pin, pinned.pin_ttl_s, pinned.tenant) == (True, 60.0, "acme")
        # One pin for all answers to a prompt.
        assert (other.pin, other.tenant) == (False, "acme")
        assert (plain.pin, plain.pin_ttl_s, plain.tenant) == (False, 0.0, "")
        bad = await system.http.post(url, json=_body(), headers={"X-Tenant-Id": "x" * 129})
        assert bad.status_code == 400
        assert bad.json()["error"]["param"] == "X-Tenant-Id"


async def test_the_header_is_ignored_unless_trusted(tmp_path: Path) -> None:
    engine = _engine("a")
    async with gateway_system(write_byte_level_model(tmp_path), [engine]) as system:
        await system.http.post("/v1/completions", json=_body(), headers={"X-Tenant-Id": "acme"})
        assert engine.submits[0].tenant == ""
        for fields, param in [
            ({"cache_pin": 1}, "cache_pin"),
            ({"cache_pin": "yes"}, "cache_pin"),
            ({"cache_pin": True, "cache_pin_ttl_s": "60"}, "cache_pin_ttl_s"),
            ({"cache_pin": True, "cache_pin_ttl_s": True}, "cache_pin_ttl_s"),
            ({"cache_pin": True, "cache_pin_ttl_s": 0}, "cache_pin_ttl_s"),
            ({"cache_pin": True, "cache_pin_ttl_s": 1e9}, "cache_pin_ttl_s"),
            ({"cache_pin_ttl_s": 60}, "cache_pin_ttl_s"),
        ]:
            answer = await system.http.post("/v1/completions", json=_body(**fields))
            assert answer.status_code == 400, fields
            assert answer.json()["error"]["param"] == param


async def test_pins_of_all_engines_are_listed_and_removed(tmp_path: Path) -> None:
    engines = [_engine("a"), _engine("b")]
    engines[1].pins = [
        pb.Pin(pin_id=3, tenant="acme", num_tokens=40, num_blocks=10, expires_in_s=2.5),
        pb.Pin(pin_id=4, num_tokens=8, num_blocks=2),
    ]
    async with gateway_system(write_byte_level_model(tmp_path), engines) as system:
        answer = (await system.http.get("/pins")).json()
        first = {"id": "b:3", "tenant": "acme", "num_tokens": 40, "num_blocks": 10, "expires_in_s": 2.5}
        second = {"id": "b:4", "tenant": "", "num_tokens": 8, "num_blocks": 2, "expires_in_s": None}
        assert answer == {
            "engines": [{"engine_id": "a", "pins": []}, {"engine_id": "b", "pins": [first, second]}]
        }
        assert (await system.http.delete("/pins/b:3")).status_code == 204
        assert [pin.pin_id for pin in engines[1].pins] == [4]
        for name, status in [("b:3", 404), ("a:4", 404), ("c:4", 404), ("b:x", 400), ("4", 400)]:
            assert (await system.http.delete(f"/pins/{name}")).status_code == status, name
        await engines[0].stop()
        assert "error" in (await system.http.get("/pins")).json()["engines"][0]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_pins_are_for_developers(tmp_path: Path, method: str) -> None:
    async with gateway_system(write_byte_level_model(tmp_path), [_engine("a")], dev_mode=False) as system:
        path = "/pins" if method == "GET" else "/pins/a:1"
        assert (await system.http.request(method, path)).status_code == 404
