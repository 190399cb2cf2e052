"""What is private when it is asked for: CURVE on the sockets, and events without token ids or salts."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import zmq
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from reprise_core.kv_events import BlockStored, KvEvent
from reprise_publisher.outgoing import salt_digest
from reprise_wire.event_codec import decode_batch, replay_request_frames
from reprise_wire.event_snapshot import parse_snapshot_answer, snapshot_request_frames
from support.publisher_harness import RunningPublisher, running_publisher
from support.service_process import ServiceProcess
from support.valkey_server import free_port
from support.waiting import until

SALTED = BlockStored(
    block_hashes=(1, 2),
    parent_block_hash=None,
    token_ids=(1, 2, 3, 4),
    block_size=2,
    lora_id=None,
    medium="GPU",
    lora_name=None,
    extra_keys=(("tenant's salt",), None),
)


@dataclass
class Keys:
    folder: Path
    server: bytes
    client: tuple[bytes, bytes]

    @property
    def settings(self) -> dict[str, str]:
        return {
            "curve_secret_key_file": str(self.folder / "server.key"),
            "curve_allowed_keys_file": str(self.folder / "allowed"),
        }


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    server, secret = zmq.curve_keypair()
    client = zmq.curve_keypair()
    (tmp_path / "server.key").write_bytes(secret)
    (tmp_path / "allowed").write_bytes(client[0] + b" a router\n")
    return Keys(tmp_path, server, client)


def connect(
    publisher: RunningPublisher, kind: int, server: bytes = b"", pair: tuple[bytes, bytes] | None = None
) -> zmq.Socket:
    sockets = publisher.app.sockets
    assert sockets is not None
    socket: zmq.Socket = publisher.context.socket(kind)
    socket.linger = 0
    if pair is not None:
        socket.curve_serverkey = server
        socket.curve_publickey, socket.curve_secretkey = pair
    if kind == zmq.SUB:
        socket.subscribe("")
    socket.connect(sockets.events_endpoint if kind == zmq.SUB else sockets.replay_endpoint)
    return socket


async def hears(publisher: RunningPublisher, socket: zmq.Socket, timeout_s: float) -> bool:
    """Whether events that go on being published reach a subscriber."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while asyncio.get_running_loop().time() < deadline_s:
        publisher.scheduler.offer()
        if await asyncio.to_thread(socket.poll, 20):
            return True
    return False


async def test_an_allowed_key_gets_events_and_replays(keys: Keys) -> None:
    async with running_publisher(**keys.settings) as publisher:
        subscriber = connect(publisher, zmq.SUB, keys.server, keys.client)
        assert await hears(publisher, subscriber, 10)
        dealer = connect(publisher, zmq.DEALER, keys.server, keys.client)
        dealer.send_multipart(replay_request_frames(0))
        assert await asyncio.to_thread(dealer.poll, 5000)
        assert publisher.metric("curve_refused_total") == 0


async def test_other_keys_and_plain_connections_get_nothing(keys: Keys) -> None:
    async with running_publisher(**keys.settings) as publisher:
        stranger = connect(publisher, zmq.SUB, keys.server, zmq.curve_keypair())
        await until(lambda: publisher.metric("curve_refused_total") >= 1)
        plain = connect(publisher, zmq.SUB)
        fooled = connect(publisher, zmq.SUB, zmq.curve_keypair()[0], keys.client)
        dealer = connect(publisher, zmq.DEALER)
        dealer.send_multipart(replay_request_frames(0))
        # Those that are let in hear at once.
        welcome = connect(publisher, zmq.SUB, keys.server, keys.client)
        assert await hears(publisher, welcome, 10)
        for other in (stranger, plain, fooled):
            assert not await hears(publisher, other, 0.1)
        assert not dealer.poll(0)


async def test_any_key_is_enough_where_that_is_said(keys: Keys) -> None:
    settings = {**keys.settings, "curve_allowed_keys_file": "any"}
    async with running_publisher(**settings) as publisher:
        assert await hears(publisher, connect(publisher, zmq.SUB, keys.server, zmq.curve_keypair()), 10)


def test_a_secret_key_without_allowed_ones_ends_the_start(tmp_path: Path, keys: Keys) -> None:
    process = ServiceProcess(
        "publisher",
        tmp_path,
        metrics_port=free_port(),
        listen_address=f"127.0.0.1:{free_port()}",
        events_config=json.dumps({"enable_kv_cache_events": True}),
        curve_secret_key_file=keys.settings["curve_secret_key_file"],
    )
    try:
        assert process.wait() == 1
        assert "curve_allowed_keys_file: must be a file or folder of keys, or 'any'" in (
            process.log_path.read_text()
        )
    finally:
        process.kill()


async def first_message(publisher: RunningPublisher) -> common_pb2.KvEventBatch:
    address = publisher.app._settings.listen_address
    async with grpc.aio.insecure_channel(address) as channel:
        call = VllmEngineStub(channel).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=10)
        message: common_pb2.KvEventBatch = await call.read()
        call.cancel()
        return message


async def test_the_plain_grpc_stream_is_not_offered_beside_curve(keys: Keys) -> None:
    async with running_publisher(**keys.settings) as publisher:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await first_message(publisher)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "encrypted" in (raised.value.details() or "")
    async with running_publisher(**keys.settings, allow_plain_grpc=True) as publisher:
        assert (await first_message(publisher)).HasField("snapshot")


async def everywhere(**settings: Any) -> tuple[list[KvEvent], common_pb2.KvEventBatch]:
    """What the live stream, a replay and a snapshot say of one event, and the gRPC stream's message."""
    async with running_publisher(**settings) as publisher:
        live = connect(publisher, zmq.SUB)
        assert await hears(publisher, live, 10)
        next_sequence = publisher.scheduler.offer_events(SALTED) + 2  # sequence 0 is the publisher's own
        await publisher.published(next_sequence)
        while len(events := decode_batch((await asyncio.to_thread(live.recv_multipart))[2]).events) != 1 or (
            not isinstance(events[0], BlockStored)
        ):
            pass
        dealer = connect(publisher, zmq.DEALER)
        dealer.send_multipart(replay_request_frames(next_sequence - 1))
        replayed = decode_batch((await asyncio.to_thread(dealer.recv_multipart))[3]).events
        await asyncio.to_thread(dealer.recv_multipart)  # the end mark
        dealer.send_multipart(snapshot_request_frames())
        chunk = parse_snapshot_answer(await asyncio.to_thread(dealer.recv_multipart))
        told = decode_batch(chunk.payload).events[1]
        return [events[0], replayed[0], told], await first_message(publisher)


def same_content(event: KvEvent, expected: BlockStored) -> bool:
    assert isinstance(event, BlockStored)
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "extra_keys")
    return all(getattr(event, name) == getattr(expected, name) for name in names)


async def test_events_go_out_as_they_are_by_default() -> None:
    told, message = await everywhere()
    assert all(same_content(event, SALTED) for event in told)
    stored = message.events[1].stored
    assert (list(stored.blocks[0].token_ids), stored.cache_salt) == ([1, 2], "tenant's salt")


async def test_token_ids_leave_nowhere() -> None:
    told, message = await everywhere(event_token_ids=False)
    assert [event.token_ids for event in told if isinstance(event, BlockStored)] == [(), (), ()]
    assert [list(block.token_ids) for block in message.events[1].stored.blocks] == [[], []]


async def test_salts_leave_nowhere() -> None:
    told, message = await everywhere(event_salts="digest", event_salt_secret="key")
    digest = salt_digest("tenant's salt", b"key")
    assert [event.extra_keys for event in told if isinstance(event, BlockStored)] == [((digest,), None)] * 3
    stored = message.events[1].stored
    assert stored.cache_salt == digest
    assert [key.text for key in stored.blocks[0].extra_keys] == [digest]
    assert "tenant" not in str(message)
