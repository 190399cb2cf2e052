"""A gateway with a real tokenizer and fake engines, on free ports, within the test's event loop."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from reprise_gateway.app import GatewayApp
from reprise_gateway.settings import GatewaySettings
from reprise_tokenizer.app import TokenizerApp
from reprise_tokenizer.settings import TokenizerSettings
from support.fake_engine import FakeEngine
from support.valkey_server import free_port
from support.waiting import until

QUICK = {
    "stream_grace_s": 0.5,
    "failover_wait_s": 3.0,
    "info_interval_s": 0.05,
    "retry_interval_s": 0.05,
    "connect_timeout_s": 2.0,
    "grace_period_s": 2.0,
}


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def make_tokenizer(model_path: Path, address: str, **settings: Any) -> TokenizerApp:
    return TokenizerApp(
        TokenizerSettings(
            listen_address=address,
            model_path=str(model_path),
            model_name="smollm2",
            grace_period_s=0.2,
            **settings,
        )
    )


@dataclass
class GatewaySystem:
    gateway: GatewayApp
    tokenizer: TokenizerApp
    engines: Sequence[FakeEngine]
    http: httpx.AsyncClient
    tokenizer_address: str
    engine_addresses: Sequence[str]

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.registry.get_sample_value(f"reprise_gateway_{name}", labels) or 0.0


@asynccontextmanager
async def gateway_system(
    model_path: Path,
    engines: Sequence[FakeEngine],
    *,
    wait_ready: bool = True,
    any_role: bool = False,
    tokenizer_settings: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[GatewaySystem]:
    http_address, tokenizer_address = free_address(), free_address()
    engine_addresses = [free_address() for _ in engines]
    tokenizer = make_tokenizer(model_path, tokenizer_address, any_role=any_role, **(tokenizer_settings or {}))
    gateway = GatewayApp(
        GatewaySettings(
            listen_address=http_address,
            tokenizer_address=tokenizer_address,
            engines=",".join(engine_addresses),
            **{**QUICK, "dev_mode": True, **settings},
        )
    )
    for engine, address in zip(engines, engine_addresses, strict=True):
        await engine.start(address)
    await tokenizer.start()
    await gateway.start()
    http = httpx.AsyncClient(base_url=f"http://{http_address}", timeout=30, trust_env=False)
    try:
        if wait_ready:
            await until(lambda: gateway.readiness.ready)
        yield GatewaySystem(gateway, tokenizer, engines, http, tokenizer_address, engine_addresses)
    finally:
        await http.aclose()
        await gateway.stop()
        await tokenizer.stop()
        for engine in engines:
            await engine.stop()
