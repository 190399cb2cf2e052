"""The publisher as a process: killed, started again, stopped."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from reprise_cli.events import Follower
from reprise_core.kv_events import AllBlocksCleared, KvEventBatch
from reprise_wire.event_codec import PublishedBatch
from support.publisher_harness import Scheduler
from support.service_process import ServiceProcess
from support.valkey_server import free_port


class Recorder:
    """What a subscriber was shown, and the signal that some of it has come."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, KvEventBatch]] = []
        self.notices: list[str] = []
        self.arrived = threading.Condition()

    def batch(self, message: PublishedBatch, batch: KvEventBatch, *, replayed: bool) -> None:
        with self.arrived:
            self.shown.append((message.sequence, batch))
            self.arrived.notify_all()

    def notice(self, kind: str, text: str, **facts: int | str) -> None:
        self.notices.append(kind)

    def wait_for(self, num_batches: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.shown) >= num_batches, 10), self.shown


class Ports:
    def __init__(self) -> None:
        self.intake, self.events, self.replay, self.metrics, self.grpc = (free_port() for _ in range(5))

    def start(self, folder: Path) -> ServiceProcess:
        config = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://127.0.0.1:{self.events}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay}",
            "topic": "kv@e@m",
        }
        process = ServiceProcess(
            "publisher",
            folder,
            metrics_port=self.metrics,
            listen_address=f"127.0.0.1:{self.grpc}",
            intake_endpoint=f"tcp://127.0.0.1:{self.intake}",
            events_config=json.dumps(config),
            bind="bind",
            heartbeat_s=0.2,
        )
        process.wait_until_ready()
        return process


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_a_killed_publisher_comes_back_as_cleared(tmp_path: Path, context: zmq.Context) -> None:
    ports = Ports()
    scheduler = Scheduler(context, f"tcp://127.0.0.1:{ports.intake}")
    process = ports.start(tmp_path)
    recorder = Recorder()
    follower = Follower(
        f"tcp://127.0.0.1:{ports.events}",
        replay=f"tcp://127.0.0.1:{ports.replay}",
        start=0,
        topic="kv@",
        printer=recorder,
    )
    following = threading.Thread(target=follower.run, args=(0,), daemon=True)
    try:
        following.start()
        for _ in range(20):
            scheduler.offer()
        recorder.wait_for(24)
        process.kill()
        num_before = len(recorder.shown)
        scheduler.offer()
        process = ports.start(tmp_path)
        recorder.wait_for(num_before + 3)
        assert "restart" in recorder.notices
        after = recorder.shown[num_before:]
        assert after[0][0] == 0
        assert after[0][1].events == (AllBlocksCleared(),)
        assert process.terminate() == 0
    finally:
        process.kill()
        follower.stop()
        following.join(5)
        follower.close()


def test_a_taken_port_ends_the_start_with_a_sentence(tmp_path: Path, context: zmq.Context) -> None:
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}
    process = ServiceProcess(
        "publisher",
        tmp_path,
        metrics_port=free_port(),
        listen_address=f"127.0.0.1:{free_port()}",
        intake_endpoint=f"tcp://127.0.0.1:{free_port()}",
        events_config=json.dumps(config),
        bind="bind",
    )
    try:
        assert process.wait() == 1
        assert f"publisher: cannot bind tcp://127.0.0.1:{port}: Address already in use" in (
            process.log_path.read_text()
        )
    finally:
        process.kill()


def test_events_that_are_off_are_said_to_be(tmp_path: Path) -> None:
    process = ServiceProcess(
        "publisher", tmp_path, metrics_port=free_port(), listen_address=f"127.0.0.1:{free_port()}"
    )
    try:
        process.wait_until_ready()
        assert "reprise_publisher_enabled 0.0" in process.metrics()
        assert "KV events are off" in process.log_path.read_text()
        assert process.terminate() == 0
    finally:
        process.kill()
