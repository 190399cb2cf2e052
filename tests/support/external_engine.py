"""An engine with a small real model beside a store: its scheduler and its worker run in this process."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from reprise.v1 import common_pb2
from reprise.v1 import engine_pb2 as pb
from reprise_scheduler.sched.scheduler import Scheduler
from reprise_worker.app import WorkerApp
from reprise_worker.settings import WorkerSettings
from support.scheduler_harness import GatewaySide, Received, SchedulerHarness, running_scheduler
from support.valkey_server import free_port
from support.waiting import until

BLOCK = 4
ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class StoreAddress:
    grpc: str
    blocks: str


@dataclass
class RealEngine:
    harness: SchedulerHarness
    gateway: GatewaySide
    worker: WorkerApp | None
    """None: the worker is a process of its own."""
    _names: "count[int]"

    @property
    def scheduler(self) -> Scheduler:
        scheduler = self.harness.app._loop.scheduler
        assert scheduler is not None
        return scheduler

    def submit(
        self, prompts: Sequence[list[int]], max_tokens: int, *, salt: str = "", adapter: str = ""
    ) -> list[str]:
        """`adapter`: its name."""
        names = [f"r{next(self._names)}" for _ in prompts]
        more = {"lora": self.adapter(adapter)} if adapter else {}
        for name, prompt in zip(names, prompts, strict=True):
            self.gateway.submit(name, prompt, max_tokens=max_tokens, salt=salt, **more)
        return names

    def adapter(self, name: str) -> common_pb2.LoraAdapter:
        """As the engine tells it."""
        assert self.harness.info is not None
        return next(adapter for adapter in self.harness.info.adapters if adapter.name == name)

    async def answers(self, names: Sequence[str]) -> list[Received]:
        await self.gateway.ended(*names, timeout_s=ANSWER_TIMEOUT_S)
        answers = [self.gateway.requests[name] for name in names]
        for answer in answers:
            assert answer.finished is not None
            assert not answer.finished.error.kind, answer.finished
        return answers

    async def ask(
        self, prompts: Sequence[list[int]], max_tokens: int, *, salt: str = "", adapter: str = ""
    ) -> list[Received]:
        return await self.answers(self.submit(prompts, max_tokens, salt=salt, adapter=adapter))

    async def reset(self, *, external: bool = False, running: bool = False) -> pb.ResetPrefixCacheResponse:
        request = pb.ResetPrefixCacheRequest(reset_external=external, reset_running_requests=running)
        answer: pb.ResetPrefixCacheResponse = await self.harness.stub.ResetPrefixCache(request)
        return answer

    async def forget(self) -> None:
        """The blocks on the device; what was saved stays in the store."""
        await until(lambda: self.idle)
        assert (await self.reset()).device

    @property
    def idle(self) -> bool:
        return not self.scheduler.unfinished() and not self.scheduler.loading

    def check_nothing_leaked(self) -> None:
        """Of an idle engine."""
        scheduler = self.scheduler
        assert self.idle
        scheduler.manager.check_invariants()
        assert scheduler.manager.usage == 0
        assert scheduler.gate.num_held_blocks == 0
        assert not scheduler.connector.looking_up

    def worker_metric(self, name: str, **labels: str) -> float:
        assert self.worker is not None
        return self.worker.registry.get_sample_value(f"reprise_worker_{name}", labels) or 0.0


@asynccontextmanager
async def scheduler_beside(store: StoreAddress, **settings: object) -> AsyncIterator[SchedulerHarness]:
    """What the store has is waited for and loaded, however busy this machine is."""
    values = {
        "store_address": store.grpc,
        "worker_timeout_s": 20.0,
        "max_external_wait_s": 15.0,
        "load_rule": "always",
        **settings,
    }
    async with running_scheduler(**values) as harness:
        yield harness


@asynccontextmanager
async def attached(harness: SchedulerHarness, worker: WorkerApp | None) -> AsyncIterator[RealEngine]:
    """Waits for the worker and until the store has named its generation."""
    async with asyncio.timeout(90):
        while not harness.app.readiness.ready:
            await asyncio.sleep(0.02)
    await harness.wait_for_worker()
    gateway = await GatewaySide(harness, gateway_id="test").attach()
    engine = RealEngine(harness, gateway, worker, count(1))
    await until(lambda: engine.scheduler.connector.generation is not None)
    try:
        yield engine
    finally:
        await gateway.cut()


@asynccontextmanager
async def running_worker(
    model: Path, store: StoreAddress, scheduler_endpoint: str, **settings: object
) -> AsyncIterator[WorkerApp]:
    chosen: dict[str, object] = {
        "model_path": str(model),
        "scheduler_endpoint": scheduler_endpoint,
        "store_endpoint": store.blocks,
        "block_size": BLOCK,
        "num_blocks": 400,
        "num_threads": 1,
        **settings,
    }
    app = WorkerApp(WorkerSettings(**chosen))  # type: ignore[arg-type]
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


@asynccontextmanager
async def real_engine(
    model: Path, store: StoreAddress, *, worker: dict[str, object] | None = None, **settings: object
) -> AsyncIterator[RealEngine]:
    """`settings` are the scheduler's, `worker` the worker's."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    async with (
        scheduler_beside(store, workers_endpoint=endpoint, **settings) as harness,
        running_worker(model, store, endpoint, **(worker or {})) as app,
        attached(harness, app) as engine,
    ):
        yield engine
