"""Wires the gateway together."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import uvicorn
from prometheus_client import CollectorRegistry

from reprise_core.errors import Unavailable
from reprise_gateway.calls import CallLimits
from reprise_gateway.completions import Completions, Prompts
from reprise_gateway.engine_link import EngineLink
from reprise_gateway.fleet import Fleet
from reprise_gateway.fleet_admin import FleetAdmin
from reprise_gateway.http_app import ROUTES, GatewayHttp
from reprise_gateway.http_limits import RequestLimits
from reprise_gateway.metrics import GatewayMetrics
from reprise_gateway.routing import LeastInFlight
from reprise_gateway.settings import GatewaySettings
from reprise_gateway.text_link import TextLink
from reprise_gateway.traces import RequestTraces
from reprise_runtime.addresses import split_address
from reprise_runtime.grpc_server import channel
from reprise_runtime.health import Readiness
from reprise_runtime.logs import get_logger
from reprise_runtime.tracing import Tracing
from reprise_wire.clients.engine import EngineClient
from reprise_wire.clients.tokenizer import TokenizerClient

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_START_POLL_S = 0.01


class GatewayApp:
    """Accepts HTTP at once; ready when the tokenizer and an engine can be used."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.registry = CollectorRegistry()
        self.readiness = Readiness("http", "tokenizer", "engine")
        self._settings = settings
        self._log = get_logger()
        self._metrics = GatewayMetrics(self.registry)
        self._tracing = Tracing(settings.trace_exporter, settings.service, self.registry)
        self._traces = RequestTraces(self._tracing)
        self._tasks: list[asyncio.Task[None]] = []
        self._server: uvicorn.Server | None = None

    async def start(self) -> None:
        settings = self._settings
        listener = _listen(settings.listen_address)
        # Channels belong to the running loop, so everything that talks is made here.
        self._channels = [
            channel(address, self._tracing)
            for address in (settings.tokenizer_address, *settings.engine_addresses)
        ]
        fleet = self._make_fleet()
        limited = self._make_http(fleet)
        forever = [link.run() for link in fleet.links]
        forever += [fleet.expire_forever(), self._text.run()]
        self._tasks = [asyncio.ensure_future(task) for task in forever]
        config = uvicorn.Config(
            self._traces.around_http(limited),
            http="httptools",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            # Longer than the idle limit of common proxies and clients, which then close first.
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, int(settings.grace_period_s * 0.8)),
        )
        self._server = _Server(config)
        serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        self._tasks.append(serving)
        while not self._server.started and not serving.done():  # it sets no event
            await asyncio.sleep(_START_POLL_S)
        self.readiness.met("http")
        self._log.info("listening", http=settings.listen_address, engines=settings.engines)

    async def run(self) -> None:
        # Not gather: when this is cancelled, what runs is still to be finished by stop.
        ended, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()

    async def stop(self) -> None:
        """No new connections; what runs is finished, up to the grace period."""
        if self._server is not None:
            self._server.should_exit = True
            await asyncio.gather(self._tasks[-1], return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in self._channels:
            await one.close()
        await asyncio.to_thread(self._tracing.close)

    def _make_fleet(self) -> Fleet:
        settings = self._settings
        fleet = Fleet(
            LeastInFlight(),
            metrics=self._metrics,
            wait_s=settings.failover_wait_s,
            max_resubmissions=settings.max_resubmissions,
            on_state=lambda problem: self._show("engine", problem),
        )
        tokenizer_peer = f"tokenizer {settings.tokenizer_address}"
        self._tokenizer = TokenizerClient(
            self._channels[0], timeout_s=settings.tokenize_timeout_s, peer=tokenizer_peer
        )
        self._text = TextLink(
            self._traces.watch_text(self._tokenizer),
            metrics=self._metrics,
            on_stop=fleet.stopped_by_text,
            on_state=lambda problem: self._show("tokenizer", problem),
            wait_s=settings.failover_wait_s,
            retry_interval_s=settings.retry_interval_s,
            connect_timeout_s=settings.connect_timeout_s,
        )
        gateway_id = f"gateway-{secrets.token_hex(8)}"
        links = [
            EngineLink(
                address,
                EngineClient(one, peer=f"engine {address}"),
                gateway_id=gateway_id,
                owner=fleet,
                metrics=self._metrics,
                grace_s=settings.stream_grace_s,
                retry_interval_s=settings.retry_interval_s,
                info_interval_s=settings.info_interval_s,
                connect_timeout_s=settings.connect_timeout_s,
            )
            for address, one in zip(settings.engine_addresses, self._channels[1:], strict=True)
        ]
        fleet.wire(links, self._text)
        return fleet

    def _make_http(self, fleet: Fleet) -> RequestLimits:
        settings = self._settings
        prompts = Prompts(
            self._tokenizer, wait_s=settings.failover_wait_s, retry_interval_s=settings.retry_interval_s
        )
        http = GatewayHttp(
            Completions(
                fleet,
                prompts,
                metrics=self._metrics,
                traces=self._traces,
                max_sequences=settings.max_inflight_sequences,
            ),
            FleetAdmin(
                fleet,
                self.registry,
                reset_timeout_s=settings.reset_timeout_s,
                metrics_timeout_s=settings.metrics_timeout_s,
            ),
            metrics=self._metrics,
            limits=CallLimits(
                max_choices=settings.max_choices,
                max_stop_strings=settings.max_stop_strings,
                max_stop_characters=settings.max_stop_characters,
            ),
            max_body_bytes=settings.max_body_bytes,
            trust_tenant_header=settings.trust_tenant_header,
            version=_version(),
            problem=self._problem,
            num_inflight=lambda: limited.num_inflight,
        )
        limited = RequestLimits(
            http.make_app(dev_mode=settings.dev_mode),
            routes=ROUTES,
            max_inflight=settings.max_inflight_requests,
            metrics=self._metrics,
        )
        return limited

    def _show(self, condition: str, problem: str | None) -> None:
        if problem is None:
            if condition in self.readiness.waiting_for():
                self._log.info("connected", peer=condition)
            self.readiness.met(condition)
            return
        if self.readiness.waiting_for().get(condition) != problem:
            self._log.info("waiting", peer=condition, problem=problem)
        self.readiness.unmet(condition, problem)

    def _problem(self) -> str | None:
        waiting = self.readiness.waiting_for()
        waiting.pop("http", None)
        return "; ".join(f"waiting for {why}" for why in waiting.values()) or None


class _Server(uvicorn.Server):
    """Signals are the service runner's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {address}: {error}") from error
    listener.setblocking(False)
    return listener


def _version() -> str:
    try:
        return version("reprise")
    except PackageNotFoundError:
        return "0"
