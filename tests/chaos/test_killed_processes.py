"""The store or the worker is killed while blocks are loaded or saved: tokens stay right, blocks come back."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from reprise_core.steps import LoadReport, pack_ids
from support.external_engine import (
    BLOCK,
    RealEngine,
    StoreAddress,
    attached,
    real_engine,
    running_worker,
    scheduler_beside,
)
from support.external_world import (
    NUM_TOKENS,
    LoadGate,
    Model,
    external_tokens,
    num_full_blocks,
    prompts_of,
    small_real_model,
    store_address,
)
from support.service_process import ServiceProcess
from support.store_harness import KEYSPACE, block_hashes, running_store
from support.tcp_proxy import TcpProxy
from support.valkey_server import ValkeyProcess, free_port
from support.waiting import until
from support.worker_link import linked_worker
from support.worker_process import WorkerProcess


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return small_real_model(tmp_path_factory.mktemp("killed") / "model")


@pytest.fixture
def redis(tmp_path: Path):
    server = ValkeyProcess(tmp_path).start()
    yield server
    server.kill()


class StoreProcess:
    """Its addresses stay the same when it is started again."""

    def __init__(self, folder: Path, redis_port: int) -> None:
        self._folder = folder
        self._redis_url = f"redis://127.0.0.1:{redis_port}/0"
        self.address = StoreAddress(f"127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}")
        self.process: ServiceProcess | None = None

    def start(self) -> None:
        self.process = ServiceProcess(
            "store",
            self._folder,
            metrics_port=free_port(),
            listen_address=self.address.grpc,
            blocks_endpoint=self.address.blocks,
            redis_url=self._redis_url,
            capacity_bytes=0,
        )
        self.process.wait_until_ready()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()


def num_in_redis(redis: ValkeyProcess) -> int:
    return sum(name.count(b":") > 2 for name in redis.command("KEYS", "*"))


async def ask(engine: RealEngine, model: Model, prompts: list[list[int]]) -> int:
    """External tokens."""
    answers = await engine.ask(prompts, NUM_TOKENS)
    assert [answer.token_ids for answer in answers] == model.right(prompts)
    return external_tokens(answers)


@pytest.mark.parametrize("while_", ["loading", "saving"])
async def test_the_store_is_killed_and_started_again(
    model: Model, redis: ValkeyProcess, tmp_path: Path, while_: str
) -> None:
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    async with TcpProxy(redis.port) as proxy:
        store = StoreProcess(tmp_path, proxy.port)
        await asyncio.to_thread(store.start)
        try:
            async with real_engine(model.folder, store.address, worker={"load_timeout_s": 60}) as engine:
                prompts = prompts_of(rng)
                if while_ == "loading":
                    await ask(engine, model, prompts)
                    await until(lambda: num_in_redis(redis) >= num_full_blocks(prompts))
                    await engine.forget()
                    names = engine.submit(prompts, NUM_TOKENS)
                    # Look-ups pass; what Redis answers to the loads behind them does not.
                    await until(lambda: bool(engine.scheduler.loading))
                    proxy.hold()
                else:
                    proxy.delay_s = 0.05
                    names = engine.submit(prompts, NUM_TOKENS)
                    await until(lambda: engine.worker_metric("save_bytes_total") > 0)
                store.kill()
                killed_s = time.monotonic()
                answers = await engine.answers(names)
                assert [answer.token_ids for answer in answers] == model.right(prompts)
                took_s = time.monotonic() - killed_s
                print(f"killed while {while_}: answers after {took_s:.2f} s")
                assert took_s < 30, "the load's time-out is 60 s: nobody waits for a store that is gone"
                await ask(engine, model, prompts_of(rng))
                assert engine.harness.app.readiness.ready
                proxy.reset()
                proxy.let_go()
                proxy.delay_s = 0.0
                await asyncio.to_thread(store.start)
                back_s = time.monotonic()
                async with asyncio.timeout(60):
                    while not await hits_come_back(engine, model, prompts_of(rng, 1)):
                        pass
                print(f"external hits {time.monotonic() - back_s:.2f} s after the store was ready again")
                await until(lambda: engine.idle)
                engine.check_nothing_leaked()
        finally:
            store.kill()


async def hits_come_back(engine: RealEngine, model: Model, prompts: list[list[int]]) -> bool:
    await ask(engine, model, prompts)
    saves = engine.scheduler.connector
    await until(lambda: not saves.num_saves_in_flight and not len(saves.saves), 30)
    await asyncio.sleep(0.1)
    await engine.forget()
    return await ask(engine, model, prompts) == num_full_blocks(prompts) * BLOCK


async def test_a_load_does_not_wait_for_a_store_that_has_left() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with linked_worker(endpoint, KEYSPACE) as worker:
        async with running_store(blocks_endpoint=endpoint) as store:
            await until(lambda: worker.metric("store_memory_shared") == 1)
            generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
        await until(lambda: worker.metric("store_memory_shared") == 0)
        started_s = time.monotonic()
        report = await asyncio.to_thread(worker.load, [3, 4], block_hashes(2), generation)
        assert report == LoadReport(1, 0, pack_ids([3, 4]), "unavailable")
        assert time.monotonic() - started_s < 10, "its time-out is 20 s"
        # Saves wait for whoever comes next.
        worker.save([3, 4], block_hashes(2), generation)
        async with running_store(blocks_endpoint=endpoint) as store:
            await until(
                lambda: (
                    worker.metric("saves_total") + worker.metric("saves_failed_total", reason="refused") == 2
                )
            )


async def test_a_worker_is_killed_while_it_loads(model: Model, redis: ValkeyProcess, tmp_path: Path) -> None:
    """The next one's session begins anew: its requests are looked up again and loaded."""
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    async with (
        running_store(redis_url=redis.url, capacity_bytes=0, redis_timeout_s=5.0) as store,
        scheduler_beside(store_address(store), workers_endpoint=endpoint) as harness,
    ):
        settings = {"block_size": BLOCK, "num_blocks": 400, "store_endpoint": store.app.blocks_endpoint}
        with WorkerProcess(model.folder, tmp_path, scheduler_endpoint=endpoint, **settings) as first:
            async with attached(harness, None) as engine:
                gate = LoadGate(store)
                prompts = prompts_of(rng)
                await ask(engine, model, prompts)
                await until(lambda: num_in_redis(redis) >= num_full_blocks(prompts))
                await engine.forget()
                gate.close()
                names = engine.submit(prompts, NUM_TOKENS)
                await until(lambda: gate.num_waiting == len(prompts))
                first.process.kill()
                first.process.wait()
                async with running_worker(model.folder, store_address(store), endpoint) as second:
                    gate.open()
                    answers = await engine.answers(names)
                    assert [answer.token_ids for answer in answers] == model.right(prompts)
                    assert external_tokens(answers) == num_full_blocks(prompts) * BLOCK
                    assert await harness.metric("reprise_scheduler_worker_sessions_total") == 2
                    await until(lambda: engine.idle)
                    engine.check_nothing_leaked()
                    assert await hits_come_back(engine, model, prompts_of(rng))
                    assert second.registry.get_sample_value("reprise_worker_loads_total")
                    await until(lambda: store.metric("memory_leases") == 0)
                    assert store.app.readiness.ready
                    assert store.app._arena is not None
                    store.app._arena.check_invariants()
