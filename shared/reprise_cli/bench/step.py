"""`reprise bench step`: what the split costs per step.

The real scheduler service in this process; a null worker, draining clients and an event drain in
processes of their own, over real ZMQ and gRPC sockets. Plan-ahead is off, so every step's overhead
is on the path: the result's frames read -> the next plan's frames sent, and -> the step's tokens
given to gRPC for every gateway, where those of a step that found a message still being sent count until
they are sent with a later one. The peers of the rows are the design's budget and, where the context is
longer or requests wait as well, the same number of running requests without that: the cost must not grow
with either.
"""

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from statistics import median

from reprise_cli.bench.report import BenchRow
from reprise_cli.ports import free_ports
from reprise_scheduler.app import SchedulerApp
from reprise_scheduler.probe import Mark
from reprise_scheduler.settings import SchedulerSettings

CONTEXT = 1000
WARM_UP_STEPS = 100
STEPS = 1000
LIMIT_MS = {50: 1.0, 99: 3.0}
MAX_LOAD_S = 120.0
"""For one load, from its start; a bench that takes longer has failed."""
SHARES = (
    ("decode", Mark.RECEIVED, Mark.DECODED),
    ("apply", Mark.DECODED, Mark.APPLIED),
    ("plan", Mark.APPLIED, Mark.PLANNED),
    ("encode + send", Mark.PLANNED, Mark.SENT),
    ("publish", Mark.SENT, Mark.PUBLISHED),
    ("outboxes", Mark.PUBLISHED, Mark.DELIVERED),
    ("to gRPC", Mark.DELIVERED, Mark.HANDED_OVER),
)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that run and that wait, each with a prompt of `context` tokens, by several gateways."""

    running: int
    waiting: int = 0
    context: int = CONTEXT
    gateways: int = 1

    @property
    def name(self) -> str:
        more = f", {self.waiting} waiting" if self.waiting else ""
        more += f", context {self.context}" if self.context != CONTEXT else ""
        more += f", {self.gateways} gateways" if self.gateways > 1 else ""
        return f"{self.running} running{more}"


LOADS = (
    Load(1),
    Load(16),
    Load(64),
    Load(64, context=16_000),
    Load(64, waiting=512),
    Load(64, gateways=4),
    Load(256),
)


class Recorder:
    """One list of moments per turn; a turn begins when a result is received."""

    def __init__(self) -> None:
        self.turns: list[list[float | None]] = []
        self._unsent: list[list[float | None]] = []
        """Turns whose tokens lie in an outbox."""

    def mark(self, mark: Mark) -> None:
        now_s = time.perf_counter()
        if mark is Mark.RECEIVED:
            self.turns.append([None] * len(Mark))
        if mark is Mark.HANDED_OVER:
            for turn in self._unsent:
                turn[mark] = now_s
            self._unsent.clear()
        elif self.turns:
            self.turns[-1][mark] = now_s
            if mark is Mark.DELIVERED:
                self._unsent.append(self.turns[-1])

    def spans_ms(self, start: Mark, end: Mark) -> list[float]:
        return [
            (turn[end] - turn[start]) * 1000  # type: ignore[operator]
            for turn in self.turns
            if turn[start] is not None and turn[end] is not None
        ]


def step_rows(*, loads: Sequence[Load] = LOADS, steps: int = STEPS) -> list[BenchRow]:
    rows: list[BenchRow] = []
    medians_ms: dict[int, float] = {}  # by running requests, of the load with nothing else
    for load in loads:
        recorder = asyncio.run(_measure(load, steps))
        rows += _rows(load, recorder, medians_ms.get(load.running))
        medians_ms.setdefault(load.running, _percentile(recorder.spans_ms(Mark.RECEIVED, Mark.SENT), 50))
    return rows


def _rows(load: Load, recorder: Recorder, alone_ms: float | None) -> Iterator[BenchRow]:
    to_plan = recorder.spans_ms(Mark.RECEIVED, Mark.SENT)
    to_grpc = recorder.spans_ms(Mark.RECEIVED, Mark.HANDED_OVER)
    for percent, limit_ms in LIMIT_MS.items():
        peer, peer_value = ("budget", limit_ms) if load.running == 64 else ("", None)
        if to_grpc:
            value = _percentile(to_grpc, percent)
            yield BenchRow.lower_is_better(f"{load.name} to gRPC p{percent}", value, "ms", peer, peer_value)
        if alone_ms is not None and percent == 50:
            peer, peer_value = f"{load.running} running p50", alone_ms
        value = _percentile(to_plan, percent)
        yield BenchRow.lower_is_better(f"{load.name} p{percent}", value, "ms", peer, peer_value)
    for name, start, end in SHARES:
        spans_ms = recorder.spans_ms(start, end)
        if spans_ms:
            yield BenchRow(f"{load.name} share {name}", median(spans_ms), "ms")


def _percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


async def _measure(load: Load, steps: int) -> Recorder:
    grpc_port, metrics_port, workers_port, intake_port = free_ports(4)
    address = f"127.0.0.1:{grpc_port}"
    settings = SchedulerSettings(
        listen_address=address,
        metrics_address=f"127.0.0.1:{metrics_port}",
        workers_endpoint=f"tcp://127.0.0.1:{workers_port}",
        publisher_endpoint=f"tcp://127.0.0.1:{intake_port}",
        async_scheduling=False,
        max_num_seqs=load.running,
        max_num_batched_tokens=1 << 20,
    )
    recorder = Recorder()
    app = SchedulerApp(settings, recorder)
    await app.start()
    async with AsyncExitStack() as stack:
        stack.enter_context(_process("reprise_cli.bench.null_worker", settings.workers_endpoint))
        stack.enter_context(_process("reprise_cli.bench.event_drain", settings.publisher_endpoint))
        await stack.enter_async_context(asyncio.timeout(MAX_LOAD_S))
        while not app.readiness.ready:
            await asyncio.sleep(0.02)
        total = load.running + load.waiting
        starts = [total * index // load.gateways for index in range(load.gateways + 1)]
        for first, end in itertools.pairwise(starts):
            numbers = (str(first), str(end - first), str(load.context))
            stack.enter_context(_process("reprise_cli.bench.drain_client", address, *numbers))
        await _run_steps(app, recorder, load, steps)
    await app.stop()
    return recorder


async def _run_steps(app: SchedulerApp, recorder: Recorder, load: Load, steps: int) -> None:
    while app.num_running < load.running or app.num_waiting < load.waiting:
        await asyncio.sleep(0.02)
    await _until_turns(recorder, len(recorder.turns) + WARM_UP_STEPS)
    recorder.turns.clear()
    await _until_turns(recorder, steps)


async def _until_turns(recorder: Recorder, turns: int) -> None:
    while len(recorder.turns) < turns:
        await asyncio.sleep(0.05)


@contextmanager
def _process(module: str, *arguments: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", module, *arguments])
    try:
        yield
    finally:
        process.kill()
        process.wait()
