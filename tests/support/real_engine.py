"""A scheduler and a worker with a tiny model beside a store, and what plain transformers would answer."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from reprise.v1 import engine_pb2 as pb
from reprise_cli.one_process import OneProcessEngine
from reprise_scheduler.settings import SchedulerSettings
from reprise_worker.app import WorkerApp
from reprise_worker.model import load_model
from reprise_worker.settings import WorkerSettings
from support.scheduler_harness import GatewaySide, SchedulerHarness, running_scheduler
from support.store_harness import RunningStore
from support.tiny_models import plain_greedy, write_model_folder
from support.valkey_server import free_port
from support.waiting import until

NUM_TOKENS = 12
SHARED = [3 + (j * j + 5 * j) % 90 for j in range(32)]
PROMPTS = [[*SHARED[: 8 * (i % 5)], *(3 + (i * 7 + j * 3) % 90 for j in range(5 + 3 * i))] for i in range(9)]


class Model(NamedTuple):
    folder: Path
    wanted: list[list[int]]
    """What plain transformers gives for each of `PROMPTS`."""


def tiny_model(folder: Path, **changes: Any) -> Model:
    write_model_folder(folder, **changes)
    plain = load_model(folder, device=torch.device("cpu"), dtype="auto")
    return Model(folder, [plain_greedy(plain, prompt, NUM_TOKENS) for prompt in PROMPTS])


def one_process_engine(
    model: Model, *, num_blocks: int, worker: Mapping[str, Any] = MappingProxyType({}), **options: Any
) -> OneProcessEngine:
    """Scheduler (with `options`) and worker in one process, without a store; not started."""
    return OneProcessEngine(
        SchedulerSettings(publisher_endpoint="", **options),
        WorkerSettings(
            model_path=str(model.folder),
            store_endpoint="",
            **{"num_blocks": num_blocks, "block_size": 4, "num_threads": 1, **worker},
        ),
    )


class Connected(NamedTuple):
    harness: SchedulerHarness
    gateway: GatewaySide
    store: RunningStore

    async def ask(self, name: str, wanted: list[list[int]]) -> None:
        names = [f"{name}{i}" for i in range(len(PROMPTS))]
        for one, prompt in zip(names, PROMPTS, strict=True):
            self.gateway.submit(one, prompt, max_tokens=NUM_TOKENS)
        await self.gateway.ended(*names, timeout_s=60)
        for one, tokens in zip(names, wanted, strict=True):
            assert not self.gateway.requests[one].finished.error.kind, self.gateway.requests[one].finished
            assert self.gateway.requests[one].token_ids == tokens, one

    async def forget(self) -> None:
        """The blocks on the device; what was saved stays in the store."""
        await until(lambda: self.harness.app.num_running == 0)
        assert (await self.harness.stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())).device


@asynccontextmanager
async def connected(model: Model, store: RunningStore, **settings: object) -> AsyncIterator[Connected]:
    """A scheduler and a real worker beside a store."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    async with running_scheduler(
        workers_endpoint=endpoint,
        store_address=store.app._settings.listen_address,
        worker_timeout_s=20.0,
        # A hit is loaded, whatever it costs here.
        load_rule="always",
        **settings,
    ) as harness:
        worker = WorkerApp(
            WorkerSettings(
                model_path=str(model.folder),
                scheduler_endpoint=endpoint,
                store_endpoint=store.app.blocks_endpoint,
                **{"num_blocks": 60, "block_size": 4, "num_threads": 1},
            )
        )
        await worker.start()
        try:
            async with asyncio.timeout(60):
                await harness.wait_for_worker()
            connector = harness.app._loop.scheduler.connector
            await until(lambda: connector.generation is not None)
            gateway = await GatewaySide(harness).attach()
            yield Connected(harness, gateway, store)
            await gateway.cut()
        finally:
            await worker.stop()
