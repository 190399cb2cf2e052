"""The publisher as a process: killed, started again, stopped."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from reprise_core.kv_events import AllBlocksCleared
from reprise_wire.event_source_values import Delivery, DeliveryKind, SourceOptions
from reprise_wire.event_subscriber import EventSubscriber
from reprise_wire.source_sockets import SourceAddress
from support.publisher_harness import Scheduler
from support.publisher_process import PublisherPorts
from support.service_process import ServiceProcess
from support.valkey_server import free_port


class Recorder:
    """What a subscriber was given, and the signal that some of it has come. Runs in a thread of its own."""

    def __init__(self, address: SourceAddress) -> None:
        self.shown: list[Delivery] = []
        self.notices: list[str] = []
        self.arrived = threading.Condition()
        self._subscriber = EventSubscriber(
            on_delivery=self._take, on_notice=lambda notice: self.notices.append(notice.kind)
        )
        self._subscriber.add(address, SourceOptions(snapshots=False, answer_s=2))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._subscriber.turn(0.2)
        self._subscriber.close()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(5)

    def _take(self, delivery: Delivery) -> None:
        if delivery.kind is DeliveryKind.CLEARED:
            return
        with self.arrived:
            self.shown.append(delivery)
            self.arrived.notify_all()

    def wait_for(self, num_batches: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.shown) >= num_batches, 10), self.shown


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_a_killed_publisher_comes_back_as_cleared(tmp_path: Path, context: zmq.Context) -> None:
    ports = PublisherPorts(tmp_path)
    scheduler = Scheduler(context, ports.intake_endpoint)
    process = ports.start()
    recorder = Recorder(SourceAddress("p", ports.events_endpoint, ports.replay_endpoint, "kv@"))
    try:
        for _ in range(20):
            scheduler.offer()
        recorder.wait_for(24)
        process.kill()
        num_before = len(recorder.shown)
        scheduler.offer()
        process = ports.start()
        recorder.wait_for(num_before + 3)
        assert "restart" in recorder.notices
        after = recorder.shown[num_before:]
        assert after[0].sequence == 0
        assert after[0].batch.events == (AllBlocksCleared(),)
        assert process.terminate() == 0
    finally:
        process.kill()
        recorder.stop()


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
