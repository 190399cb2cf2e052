"""A whole publisher in this process on free ports, and a scheduler's side of the intake."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import zmq

from reprise.v1 import publisher_service_pb2 as pb
from reprise.v1.publisher_service_pb2_grpc import PublisherServiceStub
from reprise_core.kv_events import BlockRemoved, KvEvent, KvEventBatch
from reprise_publisher.app import PublisherApp
from reprise_publisher.settings import PublisherSettings
from reprise_runtime.grpc_server import channel
from reprise_wire.event_codec import encode_batch
from reprise_wire.event_intake import (
    StateChunk,
    StateRequest,
    batch_frames,
    hello_frames,
    parse_request,
    state_frames,
)
from support.valkey_server import free_port
from support.waiting import until

TOPIC = "kv@engine-0@model"


def payload(number: int) -> bytes:
    return encode_batch(KvEventBatch(float(number), (BlockRemoved(block_hashes=(number,), medium="GPU"),), 0))


class Scheduler:
    """A DEALER that never waits, as the contract has it. It answers the publisher only when told to
    (`requests`, `hello`, `send_state`)."""

    def __init__(self, context: zmq.Context, endpoint: str, sndhwm: int = 100_000) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndhwm = sndhwm
        self.socket.connect(endpoint)
        self.epoch = os.urandom(16)
        self.sequence = 0

    def offer(self, batch: bytes | None = None) -> int:
        """The number given; a full socket drops the batch."""
        sequence, self.sequence = self.sequence, self.sequence + 1
        with suppress(zmq.Again):
            frames = batch_frames(self.epoch, sequence, batch or payload(sequence))
            self.socket.send_multipart(frames, zmq.DONTWAIT)
        return sequence

    def offer_events(self, *events: KvEvent) -> int:
        return self.offer(encode_batch(KvEventBatch(float(self.sequence), events, 0)))

    def hello(self) -> None:
        self.socket.send_multipart(hello_frames(self.epoch, self.sequence))

    async def request(self, timeout_ms: int = 5000) -> StateRequest:
        """The publisher's next one."""
        assert await asyncio.to_thread(self.socket.poll, timeout_ms), "the publisher asks for nothing"
        return parse_request(self.socket.recv_multipart())

    def send_state(self, state_id: int, *chunks: tuple[KvEvent, ...], **numbers: Any) -> None:
        """All that is contained in the batches so far, or in those before `sequence`."""
        sequence = numbers.pop("sequence", self.sequence)
        for index, events in enumerate(chunks):
            chunk = StateChunk(state_id, index, index == len(chunks) - 1, **{**_NUMBERS, **numbers})
            content = encode_batch(KvEventBatch(0.0, events, 0))
            self.socket.send_multipart(state_frames(self.epoch, sequence, chunk, content))


_NUMBERS = {"num_blocks": 1, "num_unresolved": 0}


@dataclass
class RunningPublisher:
    app: PublisherApp
    context: zmq.Context
    scheduler: Scheduler
    stub: PublisherServiceStub

    async def status(self) -> pb.GetStatusResponse:
        response: pb.GetStatusResponse = await self.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
        return response

    async def published(self, next_sequence: int) -> None:
        """Waits until the next number is this one."""
        assert self.app.sockets is not None
        stream = self.app.sockets.stream
        await until(lambda: stream.next_sequence == next_sequence)

    def metric(self, name: str, **labels: str) -> float:
        return self.app.registry.get_sample_value(f"reprise_publisher_{name}", labels) or 0.0

    def subscriber(self, topic: str = "") -> zmq.Socket:
        """Connected and heard of by the publisher, or so after 200 ms."""
        socket = self.context.socket(zmq.SUB)
        socket.linger = 0
        socket.rcvtimeo = 5000
        socket.subscribe(topic)
        assert self.app.sockets is not None
        socket.connect(self.app.sockets.events_endpoint)
        return socket

    def dealer(self, rcvhwm: int = 1000) -> zmq.Socket:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.rcvtimeo = 5000
        socket.rcvhwm = rcvhwm
        assert self.app.sockets is not None
        socket.connect(self.app.sockets.replay_endpoint)
        return socket


@asynccontextmanager
async def running_publisher(
    events: dict[str, object] | None = None, **settings: object
) -> AsyncIterator[RunningPublisher]:
    config = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://127.0.0.1:0",
        "replay_endpoint": "tcp://127.0.0.1:0",
        "topic": TOPIC,
        **(events or {}),
    }
    defaults: dict[str, object] = {
        "listen_address": f"127.0.0.1:{free_port()}",
        "intake_endpoint": "tcp://127.0.0.1:*",
        "bind": "bind",
        "heartbeat_s": 0,
        "events_config": json.dumps(config),
    }
    app = PublisherApp(PublisherSettings(**{**defaults, **settings}))
    await app.start()
    running = asyncio.ensure_future(app.run())
    context = zmq.Context()
    assert app.sockets is not None
    grpc_channel = channel(app._settings.listen_address, own_connection=True)
    try:
        yield RunningPublisher(
            app,
            context,
            Scheduler(context, app.sockets.intake_endpoint),
            PublisherServiceStub(grpc_channel),
        )
        assert not running.done()
    finally:
        await grpc_channel.close()
        context.destroy(linger=0)
        await app.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


__all__ = ["TOPIC", "RunningPublisher", "Scheduler", "payload", "running_publisher"]
