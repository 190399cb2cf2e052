"""The life of a service process: settings, logs, health, start, signals, drain, exit codes.

    def main() -> None:
        run_service(StoreSettings, StoreApp)

An app wires its concrete parts in `start` and undoes it in `stop`, during which `run` goes on. SIGTERM
and SIGINT begin the stop; a second signal, or a stop that exceeds the grace period, ends the process.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry

from reprise_core.errors import RepriseError
from reprise_runtime.collector import spare_long_lived
from reprise_runtime.health import HealthServer, Readiness
from reprise_runtime.logs import configure_logs, get_logger
from reprise_runtime.settings import ServiceSettings, load_settings


class App(Protocol):
    registry: CollectorRegistry
    readiness: Readiness

    async def start(self) -> None:
        """Returns when the service accepts work; waiting for peers goes on in the background."""

    async def run(self) -> None:
        """Returns or raises only when the service cannot go on."""

    async def stop(self) -> None: ...


S = TypeVar("S", bound=ServiceSettings)


def run_service(settings_class: type[S], make_app: Callable[[S], App]) -> None:
    settings = load_settings(settings_class)
    configure_logs(settings.service, level=settings.log_level, log_format=settings.log_format)
    try:
        exit_code = asyncio.run(_live(settings, make_app))
    except (RepriseError, OSError) as error:
        # One clear sentence: what is wrong is outside, a trace of ours would not help.
        print(f"{settings.service}: {error}", file=sys.stderr)
        exit_code = 1
    sys.stderr.flush()
    # Native threads of libraries (gRPC, OpenMP) must not hold up the exit.
    os._exit(exit_code)


async def _live(settings: S, make_app: Callable[[S], App]) -> int:
    log = get_logger()
    app = make_app(settings)
    health = HealthServer(settings.metrics_address, registry=app.registry, readiness=app.readiness)
    health.start()
    stopping = _stop_on_signals()
    running: asyncio.Future[None] | None = None
    try:
        await app.start()
        spare_long_lived()
        log.info("started", metrics=settings.metrics_address)
        running = asyncio.ensure_future(app.run())
        waiting = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()  # raises what ended it
    finally:
        app.readiness.unmet("running", "stopping")
        try:
            # `run` goes on meanwhile: its tasks may be what drains the queues.
            await asyncio.wait_for(app.stop(), settings.grace_period_s)
        except TimeoutError:
            log.warning("stop exceeded the grace period", grace_period_s=settings.grace_period_s)
        if running is not None:
            running.cancel()
        health.stop()
    log.info("stopped")
    return 0


def _stop_on_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stopping.is_set():
            os._exit(1)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stopping
