"""A whole scheduler and a publisher process: what the publisher tells is what the cache holds."""

import asyncio
from pathlib import Path

import zmq

from reprise_core.hash_algorithms import external_hash
from reprise_core.kv_events import BlockStored
from reprise_wire.event_codec import decode_batch
from reprise_wire.event_snapshot import parse_snapshot_answer, snapshot_request_frames
from support.publisher_harness import running_publisher
from support.publisher_process import PublisherPorts
from support.scheduler_harness import GatewaySide, SchedulerHarness, running_scheduler
from support.valkey_server import free_port
from support.waiting import until
from support.zmq_worker import ZmqWorker

BLOCK_SIZE = 4


def cached_hashes(harness: SchedulerHarness) -> list[int]:
    """From the cache itself, with a hash for each block that has it."""
    pool = harness.app._loop.scheduler.manager._pool
    hashes = [pool.own_hash(block_id) for block_id in range(pool.num_blocks)]
    return sorted(external_hash(block_hash) for block_hash in hashes if block_hash is not None)


def told_hashes(endpoint: str) -> tuple[list[int], bool]:
    """From a snapshot, with a hash for each copy; and whether that is all."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.rcvtimeo = 10_000
    socket.connect(endpoint)
    socket.send_multipart(snapshot_request_frames())
    told: list[int] = []
    try:
        while True:
            chunk = parse_snapshot_answer(socket.recv_multipart())
            for event in decode_batch(chunk.payload).events:
                if isinstance(event, BlockStored):
                    assert len(event.token_ids) == len(event.block_hashes) * BLOCK_SIZE
                    told += event.block_hashes
            if chunk.meta.last:
                return sorted(told), chunk.meta.complete
    finally:
        context.destroy(linger=0)


async def agree(harness: SchedulerHarness, endpoint: str) -> int:
    async with asyncio.timeout(20):
        while await asyncio.to_thread(told_hashes, endpoint) != (cached_hashes(harness), True):
            await asyncio.sleep(0.05)
    return len(cached_hashes(harness))


async def test_through_restarts_of_the_publisher_the_worker_and_the_cache(tmp_path: Path) -> None:
    ports = PublisherPorts(tmp_path)
    settings = {
        "publisher_endpoint": ports.intake_endpoint,
        "workers_endpoint": f"tcp://127.0.0.1:{free_port()}",
    }
    try:
        async with running_scheduler(**settings) as harness:
            worker = ZmqWorker(harness.settings.workers_endpoint, num_blocks=60, step_delay_s=0.005).start()
            await harness.wait_for_worker()
            gateway = await GatewaySide(harness).attach()
            # Far more than the pool keeps, with preemptions.
            for number in range(10):
                gateway.submit(f"early-{number}", [number] * 50, max_tokens=100)
            await gateway.ended(*(f"early-{number}" for number in range(10)), timeout_s=30)
            # The publisher was not there for any of it.
            await asyncio.to_thread(ports.start)
            assert await agree(harness, ports.replay_endpoint) > 20
            gateway.submit("running", [7] * 40, max_tokens=190)
            await until(lambda: len(gateway.requests["running"].token_ids) > 20)
            ports.kill()
            await asyncio.to_thread(ports.start)
            await gateway.ended("running", timeout_s=30)
            assert await agree(harness, ports.replay_endpoint) > 20
            worker.stop()
            await until(lambda: not harness.app.readiness.ready)
            assert await agree(harness, ports.replay_endpoint) == 0
            harness.app._loop.refresh_metrics()
            assert await harness.metric("reprise_scheduler_event_silent") == 0
    finally:
        ports.kill()


async def test_events_with_whole_hashes() -> None:
    async with (
        running_publisher() as publisher,
        running_scheduler(
            publisher_endpoint=publisher.app.sockets.intake_endpoint, event_integer_hashes=False
        ) as harness,
    ):
        worker = ZmqWorker(harness.settings.workers_endpoint).start()
        await harness.wait_for_worker()
        await until(lambda: publisher.metric("complete") == 1)  # connected
        gateway = await GatewaySide(harness).attach()
        gateway.submit("a", [7] * 20, max_tokens=1)
        await gateway.ended("a")
        digests = harness.hashes([7] * 20).digests
        await until(lambda: publisher.metric("record_blocks") == 5)
        _, state, _ = await asyncio.to_thread(publisher.app.sockets.freeze_now)
        (stored,) = [told.event for told in state.stores(10)]
        assert stored.block_hashes == tuple(digests[i : i + 32] for i in range(0, len(digests), 32))
        worker.stop()
