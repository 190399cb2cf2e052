"""SubscribeKvEvents of a publisher process, read as smg's gateway reads it: its index equals the truth."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import zmq
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from support.event_engine import EventEngine
from support.service_process import ServiceProcess
from support.smg_like_client import SmgLikeClient
from support.valkey_server import free_port


class System:
    """A publisher process that can be killed and started again, an engine, and a reader."""

    def __init__(self, folder: Path, context: zmq.Context, **settings: object) -> None:
        self._folder = folder
        self._settings = settings
        self._ports = [free_port() for _ in range(5)]
        intake, _, _, _, grpc_port = self._ports
        self.address = f"127.0.0.1:{grpc_port}"
        seed = time.time_ns() % 2**32
        print(f"seed {seed}")
        self.engine = EventEngine(context, f"tcp://127.0.0.1:{intake}", random.Random(seed))
        self.publisher: ServiceProcess | None = None
        self.reader = SmgLikeClient(self.address)
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        intake, events, replay, metrics, _ = self._ports
        config = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://127.0.0.1:{events}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay}",
            "topic": "kv@e@m",
            "buffer_steps": 50,
        }
        self.publisher = await asyncio.to_thread(
            lambda: ServiceProcess(
                "publisher",
                self._folder,
                metrics_port=metrics,
                listen_address=self.address,
                intake_endpoint=f"tcp://127.0.0.1:{intake}",
                events_config=json.dumps(config),
                bind="bind",
                heartbeat_s=0.2,
                **self._settings,
            )
        )
        await asyncio.to_thread(self.publisher.wait_until_ready)

    def start_reading(self) -> None:
        self._reading = asyncio.ensure_future(self.reader.run())

    async def stop_reading(self) -> None:
        """The reader keeps its index and its cursor."""
        assert self._reading is not None
        assert not self._reading.done()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def steps(self, count: int) -> None:
        """At a pace at which the reader keeps up."""
        for number in range(count):
            self.engine.step()
            if number % 5 == 0:
                await asyncio.sleep(0.002)

    async def equals_truth(self) -> None:
        """Waits until the reader's index is the engine's, copies and contents."""
        truth, index = self.engine.truth, self.reader.index

        def equal() -> bool:
            keys = {block_hash: index.keys.get(block_hash) for block_hash in self.engine.true_keys(truth)}
            return index.copies == truth and keys == self.engine.true_keys(truth)

        try:
            await self.reader.until(equal)
        except TimeoutError:
            missing, extra = truth - index.copies, index.copies - truth
            raise AssertionError(f"{len(missing)} missing, {len(extra)} extra of {len(truth)}") from None

    def count(self, name: str) -> float:
        assert self.publisher is not None
        lines = self.publisher.metrics().splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"reprise_publisher_{name}")
        )


@asynccontextmanager
async def system(folder: Path, **settings: object) -> AsyncIterator[System]:
    context = zmq.Context()
    made = System(folder, context, **settings)
    await made.start()
    made.start_reading()
    made.engine.answer_requests()
    try:
        yield made
        assert made.reader.index.problems == []
        assert made.reader.late_metadata == 0
        assert made.reader.num_gaps_accepted == 0
    finally:
        await made.stop_reading()
        made.engine.close()
        assert made.publisher is not None
        made.publisher.kill()
        context.destroy(linger=0)


async def test_a_reader_from_the_start(tmp_path: Path) -> None:
    async with system(tmp_path) as running:
        await running.steps(300)
        await running.equals_truth()
        assert running.reader.num_calls == 1
        # It may have come while the engine was being asked for what the publisher had not heard.
        await running.reader.until(lambda: not running.reader.partly_known)
        assert running.reader.num_snapshots <= 2


async def test_a_reader_that_comes_late_gets_the_state(tmp_path: Path) -> None:
    async with system(tmp_path) as running:
        await running.steps(300)
        late = SmgLikeClient(running.address)
        reading = asyncio.ensure_future(late.run())
        running.reader, early = late, running.reader
        await running.equals_truth()
        assert late.num_snapshots == 1
        await running.steps(50)
        await running.equals_truth()
        assert late.index.problems == []
        running.reader = early
        await running.equals_truth()
        reading.cancel()


@pytest.mark.parametrize(
    ("uses_host", "num_snapshots"), [(False, 0), pytest.param(True, 1, id="stores without tokens meanwhile")]
)
async def test_a_reader_that_comes_back_goes_on_where_it_was(
    tmp_path: Path, uses_host: bool, num_snapshots: int
) -> None:
    async with system(tmp_path) as running:
        await running.steps(100)
        await running.equals_truth()
        await running.stop_reading()
        before = running.reader.num_snapshots
        running.engine.uses_host = uses_host
        await running.steps(20)
        running.start_reading()
        await running.equals_truth()
        assert (running.reader.num_calls, running.reader.num_snapshots - before) == (2, num_snapshots)


async def test_a_reader_that_comes_back_too_late_gets_the_state(tmp_path: Path) -> None:
    async with system(tmp_path) as running:
        await running.steps(100)
        await running.equals_truth()
        await running.stop_reading()
        before = running.reader.num_snapshots
        await running.steps(60)  # more than the ring keeps
        running.start_reading()
        await running.equals_truth()
        assert (running.reader.num_calls, running.reader.num_snapshots - before) == (2, 1)


async def test_a_restarted_publisher_leaves_nothing_stale(tmp_path: Path) -> None:
    async with system(tmp_path) as running:
        await running.steps(200)
        await running.equals_truth()
        assert running.publisher is not None
        running.publisher.kill()
        await running.steps(50)
        await running.start()
        await running.steps(50)
        await running.equals_truth()
        assert running.reader.num_snapshots >= 2


async def test_a_restarted_scheduler_leaves_nothing_stale(tmp_path: Path) -> None:
    async with system(tmp_path) as running:
        await running.steps(200)
        await running.equals_truth()
        running.engine.restart()
        running.engine.answer_requests()
        await running.steps(50)
        await running.equals_truth()
        assert running.reader.num_calls == 1


async def test_a_lost_batch_is_made_up_for(tmp_path: Path) -> None:
    async with system(tmp_path) as running:
        await running.steps(100)
        running.engine.lose_batch()
        await running.steps(100)
        await running.equals_truth()
        assert running.reader.num_calls == 1


async def test_a_stalled_reader_gets_a_snapshot_when_it_reads_again(tmp_path: Path) -> None:
    async with system(tmp_path, rpc_queue_batches=20) as running:
        await running.steps(20)
        await running.equals_truth()
        running.reader.reading.clear()
        # More than gRPC buffers on the way.
        while not running.count("rpc_snapshots_total") > 1:
            await running.steps(100)
            if running.count("next_sequence") > 3000:
                running.reader.reading.set()
        running.reader.reading.set()
        await running.steps(10)
        await running.equals_truth()
        assert running.reader.num_calls == 1
        assert running.reader.num_snapshots > 1


async def test_a_reader_that_takes_nothing_is_ended_and_comes_back(tmp_path: Path) -> None:
    async with system(tmp_path, rpc_stall_s=0.3) as running:
        await running.steps(20)
        await running.equals_truth()
        running.reader.reading.clear()
        while not running.count("rpc_stalled_total"):
            await running.steps(100)
        running.reader.reading.set()
        await running.equals_truth()
        assert running.reader.num_calls > 1


async def test_other_calls_of_the_service_are_unimplemented(tmp_path: Path) -> None:
    async with system(tmp_path) as running, grpc.aio.insecure_channel(running.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await VllmEngineStub(channel).HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=5)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_readers_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    async with (
        system(tmp_path, rpc_readers=1) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        await running.steps(1)
        await running.equals_truth()
        call = VllmEngineStub(channel).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert running.count("rpc_refused_total") == 1
