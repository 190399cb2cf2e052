"""`reprise bench events`: events through the real publisher process, beside a bare PUB loop.

Everything runs in processes of its own: ours is a feeder (its batches are encoded before), the publisher,
and the readers; the peer's is a loop that encodes the same batches and sends them, and as many readers.
A batch is what an engine says of one step: a full one (2048 tokens) or one that only decodes. A rate is
of one burst, from the first batch sent until the last reader has the last one; without readers, until the
publisher has it for replay. A burst stays below the publisher's `record_backlog_bytes`: it publishes first
and records after. Blocks recorded in a second, stored and removed ones, are a row of their own: that is
what can be kept up for ever.

A snapshot is taken of 1,000,000 blocks, over ZMQ and over gRPC, while 100 batches a second go on.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from select import select
from statistics import median

import grpc
import zmq
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from reprise_cli.bench.event_batches import SHAPES, step_batches
from reprise_cli.bench.event_peers import PREPARED_BATCHES, TOPIC
from reprise_cli.bench.report import BenchRow
from reprise_cli.ports import free_ports
from reprise_runtime.grpc_server import MAX_MESSAGE_BYTES
from reprise_wire.event_codec import encode_batch, parse_replay_reply, replay_request_frames
from reprise_wire.event_snapshot import parse_snapshot_answer, snapshot_request_frames

CASES = (("full", 0, 1500), ("full", 1, 1500), ("full", 8, 400), ("decode", 1, 4000))
"""Shape of the steps, readers, batches of a burst."""
REPEATS = 3
SNAPSHOT_BLOCKS = 1_000_000
SNAPSHOT_LIMIT_S = 10.0
PACE_S = 0.01
POLL_S = 0.005
RECORD_POLL_S = 0.05
START_TIMEOUT_S = 60.0
TIMEOUT_S = 60.0


class Peer:
    """One process of `event_peers`."""

    def __init__(self, role: str, endpoint: str, shape: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "reprise_cli.bench.event_peers", role, endpoint, shape],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def hear(self) -> list[str]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "a process of the benchmark has ended"
        return line.split()

    def ask(self, *words: object) -> list[str]:
        self.tell(*words)
        return self.hear()


class Publisher:
    """The real process, with ports of its own."""

    def __init__(self, stack: ExitStack) -> None:
        self.intake, self.events, self.replay, self.grpc, self._metrics = (
            f"127.0.0.1:{port}" for port in free_ports(5)
        )
        config = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://{self.events}",
            "replay_endpoint": f"tcp://{self.replay}",
            "topic": TOPIC,
            "hwm": 1_000_000,
            "max_queue_size": 1_000_000,
        }
        settings = {
            "listen_address": self.grpc,
            "intake_endpoint": f"tcp://{self.intake}",
            "metrics_address": self._metrics,
            "events_config": json.dumps(config),
            "bind": "bind",
            "log_level": "warning",
            # Nothing but what is measured.
            "heartbeat_s": "0",
        }
        environment = {f"REPRISE_PUBLISHER_{name.upper()}": value for name, value in settings.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "reprise_publisher"], env={**os.environ, **environment}
        )
        stack.callback(_end, self)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.metric("enabled")
                return
            except OSError:
                assert time.monotonic() < deadline_s, "the publisher does not start"
                time.sleep(0.05)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        return next(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith(f"reprise_publisher_{name} ")
        )

    def wait_for_batch(self, sequence: int) -> float:
        """The time at which a replay had this batch. Replays cost the publisher less than its metrics."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(f"tcp://{self.replay}")
        deadline_s = time.monotonic() + TIMEOUT_S
        try:
            while time.monotonic() < deadline_s:
                socket.send_multipart(replay_request_frames(sequence))
                if parse_replay_reply(socket.recv_multipart()) is not None:
                    return time.monotonic()
                time.sleep(POLL_S)
        finally:
            socket.close()
        raise AssertionError(f"batch {sequence} has not come")

    def wait_until_recorded(self) -> float:
        deadline_s = time.monotonic() + TIMEOUT_S
        time.sleep(POLL_S)
        while self.metric("record_backlog_bytes"):
            assert time.monotonic() < deadline_s, "the publisher does not keep up"
            time.sleep(RECORD_POLL_S)
        return time.monotonic()


class Line:
    """A sender and its readers, all of them hearing."""

    def __init__(self, stack: ExitStack, sender: Peer, endpoint: str, shape: str, num_readers: int) -> None:
        self.sender = sender
        self.readers = [Peer("reader", f"tcp://{endpoint}", shape) for _ in range(num_readers)]
        stack.callback(_end, sender, *self.readers)
        assert sender.hear() == ["ready"]

    def open(self) -> None:
        """Beats until each reader's subscription has arrived."""
        waiting = list(self.readers)
        while waiting:
            self.sender.ask("beat")
            time.sleep(0.02)
            waiting = [reader for reader in waiting if not _has_line(reader)]
        for reader in self.readers:
            assert reader.hear() == ["hearing"]

    def burst_s(self, num_batches: int) -> tuple[float, float]:
        """When it began, and when all was sent and read."""
        for reader in self.readers:
            reader.tell(num_batches)
        start, end = self.sender.ask("send", num_batches)
        ends = [float(end), *(float(reader.hear()[0]) for reader in self.readers)]
        return float(start), max(ends)


def events_rows(
    *,
    cases: Sequence[tuple[str, int, int]] = CASES,
    repeats: int = REPEATS,
    snapshot_blocks: int = SNAPSHOT_BLOCKS,
) -> list[BenchRow]:
    rows: list[BenchRow] = []
    recorded: list[float] = []
    for shape, num_readers, num_batches in cases:
        rows += _publish_rows(shape, num_readers, num_batches, repeats, recorded)
    rows.append(BenchRow("record after a burst", median(recorded), "blocks/s"))
    rows += _snapshot_rows(snapshot_blocks)
    return rows


def _publish_rows(
    shape: str, num_readers: int, num_batches: int, repeats: int, recorded: list[float]
) -> Iterator[BenchRow]:
    our_times: list[float] = []
    bare_times: list[float] = []
    with ExitStack() as stack:
        publisher = Publisher(stack)
        ours = Line(
            stack, Peer("feeder", f"tcp://{publisher.intake}", shape), publisher.events, shape, num_readers
        )
        (port,) = free_ports(1)
        endpoint = f"127.0.0.1:{port}"
        bare = Line(stack, Peer("bare", f"tcp://{endpoint}", shape), endpoint, shape, num_readers)
        ours.open()
        bare.open()
        for round_number in range(repeats + 1):
            our_s, record_s = _our_burst_s(ours, publisher, num_batches)
            start_s, end_s = bare.burst_s(num_batches)
            if round_number:  # the first one fills caches
                our_times.append(our_s)
                bare_times.append(end_s - start_s)
                recorded.append(num_batches * 2 * SHAPES[shape].num_blocks / record_s)
    name = f"publish {num_readers} subscribers" + (", decode steps" if shape == "decode" else "")
    our_rate, bare_rate = num_batches / median(our_times), num_batches / median(bare_times)
    batches = step_batches(SHAPES[shape], PREPARED_BATCHES)
    for unit, sizes in (
        ("events/s", [len(batch.events) for batch in batches]),
        ("bytes/s", [len(encode_batch(batch)) for batch in batches]),
    ):
        size = sum(sizes) / PREPARED_BATCHES
        yield BenchRow.higher_is_better(name, our_rate * size, unit, "bare PUB loop", bare_rate * size)


def _our_burst_s(ours: Line, publisher: Publisher, num_batches: int) -> tuple[float, float]:
    """Until it is read, and from then until it is recorded."""
    last = publisher.metric("next_sequence") + num_batches - 1
    start_s, end_s = ours.burst_s(num_batches)
    if not ours.readers:
        end_s = publisher.wait_for_batch(int(last))
    done_s = publisher.wait_until_recorded()
    return end_s - start_s, max(done_s - end_s, POLL_S)


def _snapshot_rows(num_blocks: int) -> Iterator[BenchRow]:
    with ExitStack() as stack:
        publisher = Publisher(stack)
        feeder = Peer("feeder", f"tcp://{publisher.intake}", "decode")
        stack.callback(_end, feeder)
        assert feeder.hear() == ["ready"]
        feeder.ask("fill", num_blocks)
        publisher.wait_until_recorded()
        before = publisher.metric("next_sequence")
        feeder.tell("pace", 100_000, PACE_S)  # until the end
        for name, take, limit_s in (
            ("snapshot", _zmq_snapshot, SNAPSHOT_LIMIT_S),
            ("gRPC snapshot", _grpc_snapshot, None),
        ):
            start_s = time.monotonic()
            taken = take(publisher)
            taken_s = time.monotonic() - start_s
            assert taken >= num_blocks, f"{taken} blocks of {num_blocks}"
            case = f"{name} {num_blocks} blocks"
            yield BenchRow.lower_is_better(case, taken_s, "s", "limit" if limit_s else "", limit_s)
            yield BenchRow(case, taken / taken_s, "blocks/s")
        assert publisher.metric("next_sequence") > before + 1


def _zmq_snapshot(publisher: Publisher) -> int:
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.rcvtimeo = int(TIMEOUT_S * 1000)
        socket.connect(f"tcp://{publisher.replay}")
        socket.send_multipart(snapshot_request_frames())
        while True:
            meta = parse_snapshot_answer(socket.recv_multipart()).meta
            if meta.last:
                return meta.num_blocks
    finally:
        context.destroy(linger=0)


def _grpc_snapshot(publisher: Publisher) -> int:
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    with grpc.insecure_channel(publisher.grpc, options=options) as channel:
        call = VllmEngineStub(channel).SubscribeKvEvents(
            common_pb2.SubscribeKvEventsRequest(), timeout=TIMEOUT_S
        )
        num_blocks = 0
        for message in call:
            num_blocks += sum(len(event.stored.blocks) for event in message.events)
            if message.snapshot.index == message.snapshot.count - 1:
                call.cancel()
                return num_blocks
    raise AssertionError("the stream ended within the snapshot")


def _has_line(peer: Peer) -> bool:
    assert peer.process.stdout is not None
    return bool(select([peer.process.stdout], [], [], 0)[0])


def _end(*started: Peer | Publisher) -> None:
    for one in started:
        one.process.kill()
        one.process.wait()
