"""The scheduler's event sender and the publisher, each killed or held up: afterwards the publisher tells
what the scheduler has, by its snapshot and by its replay."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
from prometheus_client import CollectorRegistry

from reprise_core.block_record import BlockRecord
from reprise_core.kv_events import AllBlocksCleared
from reprise_scheduler.adapters.event_sender import EventSender
from reprise_scheduler.metrics import EventMetrics
from reprise_wire.event_codec import decode_batch, parse_replay_reply, replay_request_frames
from reprise_wire.event_intake import RequestKind, request_frames
from reprise_wire.event_snapshot import SnapshotChunk, parse_snapshot_answer, snapshot_request_frames
from support.event_source import EventSource, facts_of
from support.publisher_process import PublisherPorts
from support.waiting import until

Facts = dict[tuple[int | bytes, str | None], tuple[object, ...]]


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[PublisherPorts]:
    ports = PublisherPorts(tmp_path)
    yield ports
    ports.kill()


class Sender:
    """A scheduler's side, with random traffic."""

    def __init__(self, intake: str, *, queue_batches: int = 10_000) -> None:
        self.registry = CollectorRegistry()
        self.sender = EventSender(
            intake,
            EventMetrics(self.registry),
            rank=0,
            queue_batches=queue_batches,
            record_blocks=100_000,
        )
        self._source = EventSource(random.Random(3))
        self._source.record = self.sender.record
        self.sender.start()

    def send(self, num_batches: int) -> None:
        for _ in range(num_batches):
            self.sender.send([self._source.random_event() for _ in range(3)])

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"reprise_scheduler_event_{name}", labels) or 0.0

    @property
    def facts(self) -> Facts:
        return facts_of(self.sender.record)


@asynccontextmanager
async def sending(intake: str, **options: int) -> AsyncIterator[Sender]:
    sender = Sender(intake, **options)
    try:
        yield sender
    finally:
        sender.sender.close()


def dealer(context: zmq.Context, endpoint: str) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvtimeo = 10_000
    socket.connect(endpoint)
    return socket


def snapshot(context: zmq.Context, endpoint: str) -> tuple[Facts, list[SnapshotChunk]]:
    socket = dealer(context, endpoint)
    socket.send_multipart(snapshot_request_frames())
    record, chunks = BlockRecord(limit_blocks=10**6), []
    while not chunks or not chunks[-1].meta.last:
        chunks.append(parse_snapshot_answer(socket.recv_multipart()))
        for event in decode_batch(chunks[-1].payload).events:
            record.apply(event)
    socket.close()
    return facts_of(record), chunks


def replayed(context: zmq.Context, endpoint: str) -> tuple[Facts, list[int]]:
    """What the ring says from its beginning, and the numbers in it."""
    socket = dealer(context, endpoint)
    socket.send_multipart(replay_request_frames(0))
    record, numbers = BlockRecord(limit_blocks=10**6), []
    while (message := parse_replay_reply(socket.recv_multipart())) is not None:
        numbers.append(message.sequence)
        for event in decode_batch(message.payload).events:
            record.apply(event)
    socket.close()
    return facts_of(record), numbers


async def agree(context: zmq.Context, ports: PublisherPorts, sender: Sender) -> list[int]:
    """Until the publisher tells what the scheduler has; the numbers of its ring."""
    async with asyncio.timeout(20):
        while True:
            facts, chunks = await asyncio.to_thread(snapshot, context, ports.replay_endpoint)
            if facts == sender.facts and chunks[-1].meta.complete:
                break
            await asyncio.sleep(0.05)
    from_ring, numbers = await asyncio.to_thread(replayed, context, ports.replay_endpoint)
    assert from_ring == sender.facts
    return numbers


async def test_a_publisher_killed_beside_a_busy_scheduler(
    ports: PublisherPorts, context: zmq.Context
) -> None:
    async with sending(ports.intake_endpoint) as sender:
        await asyncio.to_thread(ports.start)
        for _ in range(3):
            for _ in range(20):
                sender.send(5)
                await asyncio.sleep(0.005)
            ports.kill()
            restart = asyncio.ensure_future(asyncio.to_thread(ports.start))
            while not restart.done():
                sender.send(1)
                await asyncio.sleep(0.005)
            await restart
        sender.send(10)
        numbers = await agree(context, ports, sender)
        assert numbers == list(range(numbers[0], numbers[-1] + 1))


async def test_a_publisher_killed_beside_an_idle_scheduler(
    ports: PublisherPorts, context: zmq.Context
) -> None:
    async with sending(ports.intake_endpoint) as sender:
        await asyncio.to_thread(ports.start)
        sender.send(50)
        await agree(context, ports, sender)
        ports.kill()
        await asyncio.to_thread(ports.start)
        await agree(context, ports, sender)
        assert sender.metric("states_total", outcome="sent") >= 1


async def test_a_scheduler_that_starts_again_and_then_both(
    ports: PublisherPorts, context: zmq.Context
) -> None:
    await asyncio.to_thread(ports.start)
    async with sending(ports.intake_endpoint) as sender:
        sender.send(50)
        await agree(context, ports, sender)
    async with sending(ports.intake_endpoint) as second:
        # Nothing is cached, and nothing but its hello says so.
        await agree(context, ports, second)
        assert second.facts == {}
        second.send(20)
        await agree(context, ports, second)
    ports.kill()
    async with sending(ports.intake_endpoint) as third:
        third.send(30)
        await asyncio.to_thread(ports.start)
        third.send(5)
        await agree(context, ports, third)


async def test_a_queue_of_one_loses_batches_and_the_state_makes_up_for_them(
    ports: PublisherPorts, context: zmq.Context
) -> None:
    async with sending(ports.intake_endpoint, queue_batches=1) as sender:
        await asyncio.to_thread(ports.start)
        await agree(context, ports, sender)
        ports.pause()
        waits_s = []
        for _ in range(20_000):
            began_s = time.monotonic()
            sender.send(1)
            waits_s.append(time.monotonic() - began_s)
            if sender.metric("dropped_batches_total") > 50:
                break
        assert sender.metric("dropped_batches_total") > 50
        assert sorted(waits_s)[len(waits_s) // 2] < 0.005
        ports.resume()
        numbers = await agree(context, ports, sender)
        missing = set(range(numbers[0], numbers[-1] + 1)) - set(numbers)
        assert missing, "what was lost must show as a hole in the numbers"


async def test_events_that_go_nowhere_are_said_to(
    ports: PublisherPorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reprise_scheduler.adapters.event_sender.SILENT_AFTER_S", 0.05)
    async with sending(ports.intake_endpoint) as sender:
        sender.sender.refresh_metrics(has_cached_blocks=False)
        sender.send(1)
        await asyncio.sleep(0.1)
        sender.sender.refresh_metrics(has_cached_blocks=True)
        assert sender.metric("silent") == 1
        await asyncio.to_thread(ports.start)
        await until(lambda: sender.send(1) or sender.metric("batches_total") > 0)
        sender.sender.refresh_metrics(has_cached_blocks=True)
        assert sender.metric("silent") == 0


async def test_blocks_that_are_cached_without_any_event_are_said_to_be(
    ports: PublisherPorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reprise_scheduler.adapters.event_sender.SILENT_AFTER_S", 0.05)
    async with sending(ports.intake_endpoint) as sender:
        sender.sender.refresh_metrics(has_cached_blocks=True)
        assert sender.metric("silent") == 0
        await asyncio.sleep(0.1)
        sender.sender.refresh_metrics(has_cached_blocks=True)
        assert sender.metric("silent") == 1


async def test_a_publisher_of_another_version_gets_nothing(context: zmq.Context) -> None:
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    async with sending(f"tcp://127.0.0.1:{port}") as sender:
        identity, _ = await asyncio.to_thread(router.recv_multipart)
        (good,) = request_frames(RequestKind.WANT_STATE, sender.sender._epoch, 1)
        other_version = good.replace(b"\x02", b"\x03", 1)
        (other_epoch,) = request_frames(RequestKind.WANT_STATE, b"another", 1)
        for frame in (other_version, b"\xc1", other_epoch):
            router.send_multipart([identity, frame])
        for cause in ("version", "malformed", "epoch"):
            await until(lambda cause=cause: sender.metric("refused_total", cause=cause) == 1)
        assert sender.metric("states_total", outcome="begun") == 0


async def test_a_publisher_that_acknowledges_nothing_gets_few_chunks(
    context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reprise_scheduler.state_answer.BLOCKS_PER_CHUNK", 1)
    monkeypatch.setattr("reprise_scheduler.state_answer.CHUNKS_IN_FLIGHT", 3)
    router = context.socket(zmq.ROUTER)
    router.rcvtimeo = 5000
    port = router.bind_to_random_port("tcp://127.0.0.1")
    async with sending(f"tcp://127.0.0.1:{port}") as sender:
        identity, _ = await asyncio.to_thread(router.recv_multipart)
        sender.send(50)
        router.send_multipart([identity, *request_frames(RequestKind.WANT_STATE, sender.sender._epoch, 7)])
        await until(lambda: sender.metric("states_total", outcome="begun") == 1)
        await asyncio.sleep(0.2)
        sender.sender.send([AllBlocksCleared()])
        router.rcvtimeo = 500
        frames = []
        try:
            while True:
                frames.append(await asyncio.to_thread(router.recv_multipart))
        except zmq.Again:
            pass
        assert sum(b"state" in head for _, head, *_ in frames) == 3
        # What came live is not behind the state.
        assert sum(b"batch" in head for _, head, *_ in frames) == 51
