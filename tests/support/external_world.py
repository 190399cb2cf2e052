"""A real engine whose external blocks are in a real Redis behind a proxy, and what may happen to them.

The host tier is switched off, so that every hit comes from Redis.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from reprise_core.ids import BlockHash
from reprise_wire.block_transfer import Keyspace
from reprise_worker.model import PagedModel, load_model
from support.external_engine import BLOCK, RealEngine, StoreAddress, real_engine
from support.scheduler_harness import Received
from support.store_harness import RunningStore, hashes_by, running_store
from support.tcp_proxy import TcpProxy
from support.tiny_models import plain_greedy, write_model_folder
from support.valkey_server import ValkeyProcess
from support.waiting import until

NUM_TOKENS = 6
LIMITS: dict[str, object] = {
    "capacity_bytes": 0,
    "redis_timeout_s": 1.0,
    "redis_chunk_bytes": 16 * 1024,
    "breaker_failures": 2,
    "breaker_cooldown_s": 0.3,
}


@dataclass(frozen=True)
class Model:
    folder: Path
    plain: PagedModel

    def right(self, prompts: Sequence[list[int]], max_tokens: int = NUM_TOKENS) -> list[list[int]]:
        """What transformers alone gives."""
        return [plain_greedy(self.plain, prompt, max_tokens) for prompt in prompts]


def small_real_model(folder: Path, **changes: object) -> Model:
    import torch

    write_model_folder(folder, **changes)
    return Model(folder, load_model(folder, device=torch.device("cpu"), dtype="auto"))


def prompts_of(rng: random.Random, count: int = 4, num_blocks: int = 20) -> list[list[int]]:
    """Different ones, whose first block differs already; all blocks but the last are full."""
    return [[rng.randrange(3, 97) for _ in range(num_blocks * BLOCK + 1)] for _ in range(count)]


def num_full_blocks(prompts: Sequence[list[int]]) -> int:
    return sum((len(prompt) - 1) // BLOCK for prompt in prompts)


def external_tokens(answers: Sequence[Received]) -> int:
    assert all(answer.usage is not None for answer in answers)
    return sum(answer.usage.external_tokens for answer in answers if answer.usage is not None)


class LoadGate:
    """Loads wait in the store while it is closed: after the look-up, before anything is read."""

    def __init__(self, store: RunningStore) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.num_waiting = 0
        load = store.app.store.load

        async def gated(*arguments: object) -> object:
            self.num_waiting += 1
            try:
                await self._open.wait()
            finally:
                self.num_waiting -= 1
            return await load(*arguments)  # type: ignore[arg-type]

        store.app.store.load = gated  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


@dataclass
class World:
    model: Model
    redis: ValkeyProcess
    proxy: TcpProxy
    store: RunningStore
    gate: LoadGate
    engine: RealEngine
    rng: random.Random

    def address(self) -> StoreAddress:
        return store_address(self.store)

    async def command(self, *arguments: object) -> object:
        return await asyncio.to_thread(self.redis.command, *arguments)

    async def block_keys(self) -> list[bytes]:
        """Keys of all blocks in Redis, of every generation."""
        names = await self.command("KEYS", "*")
        assert isinstance(names, list)
        return [name for name in names if name.count(b":") > 2]

    async def settled(self) -> None:
        """Everything the engine had to save has reached Redis, or was dropped."""
        await self.handed_over()
        await self.store.settled()

    async def handed_over(self) -> None:
        """Everything the engine had to save is the store's business now."""
        assert self.engine.worker is not None

        def done() -> bool:
            connector = self.engine.scheduler.connector
            waiting = len(connector.saves) + connector.num_saves_in_flight
            return not waiting and not self.engine.worker_metric("staging_blocks_used")

        await until(done, 30)

    async def ask(self, prompts: Sequence[list[int]], right: Sequence[list[int]]) -> list[Received]:
        answers = await self.engine.ask(prompts, NUM_TOKENS)
        assert [answer.token_ids for answer in answers] == right
        return answers

    async def fill(self) -> tuple[list[list[int]], list[list[int]]]:
        """Fresh prompts, now in Redis alone, and the right answers."""
        async with asyncio.timeout(60):
            while True:
                prompts = prompts_of(self.rng)
                right = self.model.right(prompts)
                before = self.written
                await self.ask(prompts, right)
                await self.settled()
                await self.engine.forget()
                if self.written >= before + num_full_blocks(prompts):
                    return prompts, right
                # A call to Redis took too long on a busy machine.

    async def _all_is_found(self) -> bool:
        prompts, right = await self.fill()
        return external_tokens(await self.ask(prompts, right)) == num_full_blocks(prompts) * BLOCK

    @property
    def written(self) -> float:
        return self.store.metric("saves_total", tier="external", outcome="written")

    async def check_all_is_well(self) -> None:
        """Nothing hangs, leaks, or is not ready; what is computed now is found in Redis afterwards."""
        await until(lambda: self.engine.idle, 30)
        async with asyncio.timeout(60):
            while not await self._all_is_found():
                pass  # as in `fill`: such a call is a miss
        await until(lambda: self.engine.idle, 30)
        self.engine.check_nothing_leaked()
        await self.settled()
        assert self.gate.num_waiting == 0
        assert self.store.metric("memory_leases") == 0
        self.check_ready()

    def check_ready(self) -> None:
        assert self.store.app.readiness.ready
        assert self.engine.harness.app.readiness.ready
        assert self.engine.worker is not None
        assert self.engine.worker.readiness.ready


def store_address(store: RunningStore) -> StoreAddress:
    return StoreAddress(store.app._settings.listen_address, store.app.blocks_endpoint)


@asynccontextmanager
async def cold_engine(
    model: Path, redis: ValkeyProcess, *, worker: dict[str, object] | None = None, **settings: object
) -> AsyncIterator[RealEngine]:
    """With a store of its own; `worker` and `settings` as for `real_engine`."""
    async with (
        running_store(redis_url=redis.url, redis_timeout_s=5.0) as store,
        real_engine(model, store_address(store), worker=worker, **settings) as engine,
    ):
        yield engine


def stored_hashes(redis: ValkeyProcess) -> dict[Keyspace, set[BlockHash]]:
    """Of all blocks in Redis, of every generation."""
    return hashes_by(redis.command("KEYS", "*"), lambda keyspace, _: keyspace)


@asynccontextmanager
async def world(
    folder: Path, *redis_options: str, password: str = "", **store: object
) -> AsyncIterator[World]:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    (folder / "redis").mkdir(parents=True)
    model = small_real_model(folder / "model")
    redis = ValkeyProcess(folder / "redis", *redis_options, password=password).start()
    try:
        async with TcpProxy(redis.port) as proxy:
            user = f":{password}@" if password else ""
            url = f"redis://{user}127.0.0.1:{proxy.port}/0"
            async with (
                running_store(redis_url=url, **{**LIMITS, **store}) as running,
                real_engine(model.folder, store_address(running)) as engine,
            ):
                gate = LoadGate(running)
                yield World(model, redis, proxy, running, gate, engine, random.Random(seed))
    finally:
        redis.kill()
