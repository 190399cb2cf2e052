"""The worker's link against a real ROUTER: greeting, sessions, heartbeats, bad frames."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry

from reprise_core.models import KvGroup, ModelInfo, WorkerCapacity
from reprise_core.steps import LoadReport, StepPlan, StepResult, TransferReport
from reprise_runtime.health import Readiness
from reprise_wire.step_codec import PROTOCOL_VERSION, Header, Hello, Kind, Refused, Stale, Welcome, encode
from reprise_worker.adapters.scheduler_link import MAX_PLANS_IN_FLIGHT, SchedulerLink
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.ports import Event, PlanArrived, SessionBegan, SessionEnded
from support.worker_peers import SchedulerPeer

INTERVAL_S = 0.05
HELLO = Hello(
    worker_id="w1",
    rank=0,
    world_size=1,
    model=ModelInfo(
        name="m",
        path="/m",
        architecture="LlamaForCausalLM",
        dtype="float32",
        max_model_len=64,
        vocab_size=97,
        eos_token_ids=(2,),
        fingerprint="00" * 16,
    ),
    capacity=WorkerCapacity(
        num_blocks=8,
        block_size=4,
        block_nbytes=128,
        groups=(KvGroup(kind="full_attention", block_size=4, num_layers=1),),
        max_num_batched_tokens=64,
    ),
)


@dataclass
class Worker:
    """The link and the step thread's end of its inbox."""

    link: SchedulerLink
    inbox: SimpleQueue[Event]
    readiness: Readiness
    registry: CollectorRegistry
    fatal: list[BaseException]

    def next_event(self) -> Event:
        return self.inbox.get(timeout=10)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"reprise_worker_{name}", labels) or 0.0

    def begin(self, scheduler: SchedulerPeer) -> bytes:
        scheduler.welcome()
        event = self.next_event()
        assert event == SessionBegan(scheduler.session)
        scheduler.wait_for(Kind.HEARTBEAT)  # behind every HELLO of this greeting
        return scheduler.session


def make_worker(endpoint: str) -> Worker:
    inbox, registry, fatal = SimpleQueue[Event](), CollectorRegistry(), list[BaseException]()
    readiness = Readiness()
    link = SchedulerLink(
        zmq.Context.instance(),
        endpoint,
        hello=HELLO,
        inbox=inbox,
        heartbeat_interval_s=INTERVAL_S,
        readiness=readiness,
        metrics=WorkerMetrics(registry),
        on_fatal=fatal.append,
    )
    link.start()
    return Worker(link, inbox, readiness, registry, fatal)


@pytest.fixture
def scheduler() -> Iterator[SchedulerPeer]:
    peer = SchedulerPeer()
    yield peer
    peer.close()


@pytest.fixture
def worker(scheduler: SchedulerPeer) -> Iterator[Worker]:
    made = make_worker(scheduler.endpoint)
    yield made
    made.link.stop()


def test_hello_is_repeated_until_welcome(scheduler: SchedulerPeer, worker: Worker) -> None:
    for _ in range(3):
        header, hello = scheduler.receive()
        assert (header.kind, header.session, hello) == (Kind.HELLO, b"", HELLO)
    assert "no scheduler" in worker.readiness.waiting_for()["scheduler"]
    worker.begin(scheduler)
    assert worker.readiness.ready
    header, _ = scheduler.wait_for(Kind.HEARTBEAT)
    assert header.session == scheduler.session


def test_heartbeats_do_not_wait_for_a_step(scheduler: SchedulerPeer, worker: Worker) -> None:
    """Nobody takes the plan out of the inbox; the heart beats, and says busy."""
    session = worker.begin(scheduler)
    scheduler.plan(StepPlan(1))
    beats = [scheduler.wait_for(Kind.HEARTBEAT)[1] for _ in range(5)]
    assert beats[-1].busy
    assert beats[-1].last_step_id == 0
    worker.link.send_result(session, StepResult(1, b"", b"", 0.1))
    scheduler.wait_for(Kind.RESULT)
    _, beat = scheduler.wait_for(Kind.HEARTBEAT)
    assert (beat.last_step_id, beat.busy) == (1, False)


def test_plans_results_and_reports(scheduler: SchedulerPeer, worker: Worker) -> None:
    session = worker.begin(scheduler)
    scheduler.plan(StepPlan(1))
    assert worker.next_event() == PlanArrived(session, StepPlan(1))
    worker.link.send_result(session, StepResult(1, b"", b"", 0.1))
    header, result = scheduler.wait_for(Kind.RESULT)
    assert (header.session, header.step_id, result.step_id) == (session, 1, 1)
    worker.link.send_transfers(session, TransferReport((LoadReport(3, 0),)))
    _, report = scheduler.wait_for(Kind.TRANSFER)
    assert report.loads == (LoadReport(3, 0),)


def test_messages_of_another_session_are_dropped_and_counted(
    scheduler: SchedulerPeer, worker: Worker
) -> None:
    session = worker.begin(scheduler)
    scheduler.say(Kind.PLAN, StepPlan(1), session=b"x" * 16, step_id=1)
    worker.link.send_result(b"y" * 16, StepResult(9, b"", b"", 0.1))
    scheduler.plan(StepPlan(1))
    assert worker.next_event() == PlanArrived(session, StepPlan(1))
    worker.link.send_result(session, StepResult(1, b"", b"", 0.1))
    assert scheduler.wait_for(Kind.RESULT)[1].step_id == 1
    assert worker.metric("messages_stale_total") == 2


def test_stale_waits_for_the_step_thread_before_greeting_again(
    scheduler: SchedulerPeer, worker: Worker
) -> None:
    session = worker.begin(scheduler)
    scheduler.say(Kind.STALE, Stale(), session=b"x" * 16)  # of one before: says nothing of this one
    scheduler.say(Kind.PLAN, StepPlan(1), step_id=1)
    assert worker.next_event() == PlanArrived(session, StepPlan(1))
    scheduler.say(Kind.STALE, Stale())
    assert worker.next_event() == SessionEnded()
    assert "stale" in worker.readiness.waiting_for()["scheduler"]
    while scheduler.socket.poll(int(4 * INTERVAL_S * 1000)):
        assert scheduler.receive()[0].kind == Kind.HEARTBEAT  # sent before; no HELLO yet
    worker.link.session_released()
    worker.begin(scheduler)
    assert worker.readiness.ready
    assert worker.metric("sessions_total") == 2
    assert worker.metric("sessions_dropped_total", reason="stale") == 1


def test_the_newest_welcome_counts(scheduler: SchedulerPeer, worker: Worker) -> None:
    """A repeated HELLO may be answered with another session."""
    first = worker.begin(scheduler)
    scheduler.session = b"n" * 16
    welcome = Welcome(heartbeat_interval_s=INTERVAL_S, engine_id="test")
    scheduler.say(Kind.WELCOME, welcome)
    scheduler.say(Kind.WELCOME, welcome)
    assert worker.next_event() == SessionBegan(b"n" * 16)
    worker.link.send_result(first, StepResult(1, b"", b"", 0.1))
    worker.link.send_result(b"n" * 16, StepResult(7, b"", b"", 0.1))
    assert scheduler.wait_for(Kind.RESULT)[1].step_id == 7
    assert worker.inbox.empty()
    assert worker.metric("sessions_dropped_total", reason="replaced") == 1


def test_a_welcome_before_the_release_is_taken(scheduler: SchedulerPeer, worker: Worker) -> None:
    worker.begin(scheduler)
    scheduler.say(Kind.STALE, Stale())
    scheduler.session = b"n" * 16
    scheduler.say(Kind.WELCOME, Welcome(heartbeat_interval_s=INTERVAL_S, engine_id="test"))
    assert worker.next_event() == SessionEnded()
    assert worker.next_event() == SessionBegan(b"n" * 16)
    worker.link.session_released()  # of the first; the second goes on
    header, _ = scheduler.wait_for(Kind.HEARTBEAT)
    while header.session != b"n" * 16:
        header, _ = scheduler.wait_for(Kind.HEARTBEAT)
    assert worker.readiness.ready


def test_a_broken_connection_ends_the_session(scheduler: SchedulerPeer, worker: Worker) -> None:
    """Messages may have been lost with it, so both sides start over."""
    worker.begin(scheduler)
    endpoint = scheduler.endpoint
    scheduler.close()
    assert worker.next_event() == SessionEnded()
    assert worker.readiness.waiting_for()
    worker.link.session_released()
    again = SchedulerPeer(endpoint)
    try:
        worker.begin(again)
        assert worker.readiness.ready
    finally:
        again.close()


def test_a_worker_stops_while_its_scheduler_goes() -> None:
    """ZMQ tells of the lost connection while the link ends; once that blocked the whole process."""
    for _ in range(300):
        scheduler = SchedulerPeer()
        worker = make_worker(scheduler.endpoint)
        scheduler.wait_for(Kind.HELLO)
        scheduler.close()
        worker.link.stop()
    assert not worker.fatal


def test_a_worker_may_start_before_its_scheduler(scheduler: SchedulerPeer) -> None:
    endpoint = scheduler.endpoint
    scheduler.close()
    worker = make_worker(endpoint)
    try:
        time.sleep(0.3)
        assert "no scheduler at tcp://" in worker.readiness.waiting_for()["scheduler"]
        late = SchedulerPeer(endpoint)
        try:
            worker.begin(late)
        finally:
            late.close()
    finally:
        worker.link.stop()


def test_a_refusal_is_fatal_and_names_both_versions(scheduler: SchedulerPeer, worker: Worker) -> None:
    scheduler.wait_for(Kind.HELLO)
    refused = encode(
        Kind.REFUSED, Refused(scheduler_version=9, worker_version=1, reason="version"), session=b""
    )
    newer = msgspec.msgpack.encode(Header(9, Kind.REFUSED, b""))
    scheduler.socket.send_multipart([scheduler.worker, newer, refused[1]])
    deadline = time.monotonic() + 10
    while not worker.fatal and time.monotonic() < deadline:
        time.sleep(0.01)
    (error,) = worker.fatal
    assert f"scheduler speaks protocol version 9, this worker {PROTOCOL_VERSION}" in str(error)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b""],
        [b"\xc1", b"\x80"],
        [b"one", b"two", b"three"],
        encode(Kind.HEARTBEAT, Stale(), session=b"s" * 16),
        [encode(Kind.PLAN, StepPlan(1), session=b"s" * 16)[0], b"\x91"],
        encode(Kind.WELCOME, Welcome(heartbeat_interval_s=1, engine_id="e"), session=b"short"),
        [msgspec.msgpack.encode(Header(7, Kind.PLAN, b"s" * 16)), b"\x90"],
    ],
)
def test_malformed_frames_disturb_nothing(
    scheduler: SchedulerPeer, worker: Worker, frames: list[bytes]
) -> None:
    session = worker.begin(scheduler)
    # The session in the frames is the real one where they have any.
    sent = [frame.replace(b"s" * 16, session) for frame in frames]
    scheduler.socket.send_multipart([scheduler.worker, *sent])
    scheduler.plan(StepPlan(1))
    assert worker.next_event() == PlanArrived(session, StepPlan(1))
    assert worker.metric("frames_malformed_total", peer="scheduler") == 1
    assert not worker.fatal


def test_more_plans_than_allowed_end_the_session(scheduler: SchedulerPeer, worker: Worker) -> None:
    session = worker.begin(scheduler)
    for step_id in range(1, MAX_PLANS_IN_FLIGHT + 2):
        scheduler.plan(StepPlan(step_id))
    for step_id in range(1, MAX_PLANS_IN_FLIGHT + 1):
        assert worker.next_event() == PlanArrived(session, StepPlan(step_id))
    assert worker.next_event() == SessionEnded()
    assert worker.metric("sessions_dropped_total", reason="too_many_plans") == 1


def test_the_step_thread_can_drop_its_session_but_no_later_one(
    scheduler: SchedulerPeer, worker: Worker
) -> None:
    first = worker.begin(scheduler)
    worker.link.drop_session(first)
    assert worker.next_event() == SessionEnded()
    worker.link.session_released()
    worker.begin(scheduler)
    worker.link.drop_session(first)
    with pytest.raises(Empty):
        worker.inbox.get(timeout=4 * INTERVAL_S)
