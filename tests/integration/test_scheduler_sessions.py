"""Sessions, deadlines and back-pressure over real sockets: greedy tokens stay what they are."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path

import grpc
import msgspec
import pytest
import zmq
import zmq.asyncio

from reprise.v1 import common_pb2
from reprise.v1 import engine_pb2 as pb
from reprise.v1.engine_pb2_grpc import EngineStub
from reprise_core.errors import Unavailable
from reprise_core.steps import StepResult, pack_ids
from reprise_scheduler.probe import Mark
from reprise_wire.clients.tokenizer import TokenizerClient
from reprise_wire.step_codec import Body, Header, Heartbeat, Kind, decode_header, encode
from support.scheduler_harness import GatewaySide, SchedulerHarness, running_scheduler
from support.sim_worker import expected_output
from support.valkey_server import free_port
from support.waiting import until
from support.zmq_worker import ZmqWorker


def prompt_of(number: int, length: int = 21) -> list[int]:
    return [4 + (number * 7 + i * i) % 40 for i in range(length)]


@asynccontextmanager
async def traffic(
    harness: SchedulerHarness, num_requests: int = 5, max_tokens: int = 60, **worker: float
) -> AsyncIterator[tuple[ZmqWorker, GatewaySide, dict[str, list[int]]]]:
    """A worker and requests in the middle of their answers; on leaving, that every answer is right."""
    sim = ZmqWorker(harness.settings.workers_endpoint, **{"step_delay_s": 0.01, **worker}).start()
    await harness.wait_for_worker()
    gateway = await GatewaySide(harness).attach()
    prompts = {f"r{i}": prompt_of(i) for i in range(num_requests)}
    for name, prompt in prompts.items():
        gateway.submit(name, prompt, max_tokens=max_tokens)
    await until(lambda: all(len(r.token_ids) > 5 for r in gateway.requests.values()))
    yield sim, gateway, prompts
    await gateway.ended(*prompts, timeout_s=20)
    for name, prompt in prompts.items():
        assert gateway.requests[name].token_ids == expected_output(prompt, max_tokens), name
        assert not gateway.requests[name].finished.error.kind
    await gateway.cut()
    sim.stop()
    assert sim.failure is None


async def test_results_of_an_old_session_that_come_late_are_dropped_and_counted() -> None:
    async with running_scheduler() as harness:
        async with traffic(harness) as (worker, _, prompts):
            old_session = worker.session
            worker.stop()  # its successor is here before it is missed
            late = ZmqSender(harness.settings.workers_endpoint)
            second = ZmqWorker(harness.settings.workers_endpoint, step_delay_s=0.01).start()
            await until(lambda: bool(second.session))
            before = await harness.metric("reprise_scheduler_worker_stale_messages_total")
            for step_id in range(1, 30):
                for handle in range(1, 12):
                    late.result(old_session, step_id, handle)
            await until_metric(harness, "reprise_scheduler_worker_stale_messages_total", before + 29 * 11)
        assert await harness.metric("vllm:generation_tokens_total") == 60 * len(prompts)
        second.stop()
        late.close()


async def test_results_of_steps_that_nobody_waits_for_are_dropped_and_counted() -> None:
    async with running_scheduler() as harness:
        async with traffic(harness) as (worker, _, prompts):
            late = ZmqSender(harness.settings.workers_endpoint)
            late.result(worker.session, 10**6, 1)
            late.result(worker.session, 1, 1)
            await until_metric(harness, "reprise_scheduler_stale_results_total", 2)
        assert await harness.metric("vllm:generation_tokens_total") == 60 * len(prompts)
        late.close()


class ZmqSender:
    """Somebody who answers for a worker."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def result(self, session: bytes, step_id: int, handle: int) -> None:
        result = StepResult(step_id, pack_ids([handle]), pack_ids([9]), 0.0)
        self._socket.send_multipart(encode(Kind.RESULT, result, session=session, step_id=step_id))

    def close(self) -> None:
        self._socket.close(0)


async def until_metric(harness: SchedulerHarness, name: str, value: float) -> None:
    for _ in range(100):
        if await harness.metric(name) >= value:
            break
        await asyncio.sleep(0.05)
    assert await harness.metric(name) == value


async def test_a_scheduler_restarted_under_a_living_worker_serves_what_is_given_to_it_again() -> None:
    fixed = {
        "listen_address": f"127.0.0.1:{free_port()}",
        "workers_endpoint": f"tcp://127.0.0.1:{free_port()}",
    }
    prompts = {f"r{i}": prompt_of(i) for i in range(5)}
    async with running_scheduler(**fixed) as first:
        worker = ZmqWorker(first.settings.workers_endpoint, step_delay_s=0.01).start()
        await first.wait_for_worker()
        gateway = await GatewaySide(first).attach()
        for name, prompt in prompts.items():
            gateway.submit(name, prompt, max_tokens=60)
        await until(lambda: all(len(r.token_ids) > 5 for r in gateway.requests.values()))
        old_session = worker.session
        await gateway.cut()
    shown = {name: list(r.token_ids) for name, r in gateway.requests.items()}
    async with running_scheduler(**fixed) as second:
        await second.wait_for_worker()
        await until(lambda: worker.session not in (b"", old_session))
        again = await GatewaySide(second, "gw-2").attach()
        for name, prompt in prompts.items():
            # As a gateway does it: prompt and what was shown already, which counts as output.
            again.requests.setdefault(name, type(gateway.requests[name])(token_ids=list(shown[name])))
            sampling = pb.SamplingParams(top_p=1.0, max_tokens=60, ignore_eos=True)
            again.submit(name, [*prompt, *shown[name]], sampling=sampling, num_output_tokens=len(shown[name]))
        await again.ended(*prompts, timeout_s=20)
        for name, prompt in prompts.items():
            assert again.requests[name].token_ids == expected_output(prompt, 60), name
            assert again.requests[name].repeated == 0
        left = sum(60 - len(tokens) for tokens in shown.values())
        assert await second.metric("vllm:generation_tokens_total") == left
        assert worker.failure is None
        await again.cut()
    worker.stop()


@contextmanager
def worker_process(endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-m", "support.zmq_worker", endpoint], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("fault", ["stopped", "killed"])
async def test_a_worker_process_is_stopped_or_killed_under_traffic(fault: str) -> None:
    async with running_scheduler() as harness:
        endpoint = harness.settings.workers_endpoint
        with worker_process(endpoint) as worker:
            await harness.wait_for_worker()
            gateway = await GatewaySide(harness).attach()
            prompts = {f"r{i}": prompt_of(i) for i in range(6)}
            for name, prompt in prompts.items():
                gateway.submit(name, prompt, max_tokens=60)
            await until(lambda: all(len(r.token_ids) > 5 for r in gateway.requests.values()))
            worker.send_signal(signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
            await until(lambda: not harness.app.readiness.ready)
            assert await harness.metric("vllm:kv_cache_usage_perc") == 0
            gateway.submit("while away", prompt_of(7), max_tokens=20)
            if fault == "stopped":
                worker.send_signal(signal.SIGCONT)  # it answers late, for a session that is over
                second = nullcontext()
            else:
                second = worker_process(endpoint)
            with second:
                await gateway.ended(*prompts, "while away", timeout_s=20)
        for name, prompt in prompts.items():
            assert gateway.requests[name].token_ids == expected_output(prompt, 60), name
        assert gateway.requests["while away"].token_ids == expected_output(prompt_of(7), 20)
        assert await harness.metric("vllm:generation_tokens_total") == 6 * 60 + 20
        assert await harness.metric("vllm:request_success_total") == 7
        assert await harness.metric("reprise_scheduler_worker_sessions_total") == 2
        assert await harness.metric("reprise_scheduler_worker_losses_total") == 1
        await gateway.cut()


@pytest.mark.parametrize("num_blocks", [30, 200])
async def test_a_worker_that_comes_back_with_another_capacity_under_traffic(num_blocks: int) -> None:
    async with running_scheduler() as harness, traffic(harness) as (worker, _, _):
        worker.stop()
        second = ZmqWorker(harness.settings.workers_endpoint, num_blocks=num_blocks).start()
        await until(lambda: bool(second.session))
        info = await harness.stub.GetInfo(pb.GetInfoRequest())
        assert info.num_blocks == num_blocks
        await asyncio.sleep(1.5)
        second.stop()
        ZmqWorker(harness.settings.workers_endpoint).start()  # and once more, for what is left


async def test_neither_a_deaf_gateway_nor_a_full_event_queue_delays_a_step(tmp_path: Path) -> None:
    """Counted, not timed: with nobody reading, every step is still planned at once on its result, and
    its plan is on its way before anything is published or told."""
    silent = zmq.Context.instance().socket(zmq.ROUTER)
    silent.setsockopt(zmq.RCVHWM, 1)
    # The kernel keeps less of what nobody reads than for TCP.
    endpoint = f"ipc://{tmp_path / 'intake'}"
    silent.bind(endpoint)
    settings = {
        "publisher_endpoint": endpoint,
        "event_queue_batches": 1,
        "async_scheduling": False,
    }
    async with running_scheduler(**settings) as harness:
        marks: list[Mark] = []
        probe = harness.app._link._probe
        original = probe.mark
        probe.mark = lambda mark: (marks.append(mark), original(mark))
        sim = ZmqWorker(
            harness.settings.workers_endpoint, num_blocks=4000, max_model_len=3000, block_size=1
        ).start()
        await harness.wait_for_worker()
        deaf = harness.stub.Stream()
        await deaf.write(pb.StreamRequest(attach=pb.Attach(gateway_id="deaf")))
        submit = pb.Submit(
            request_id="d",
            token_ids=prompt_of(3),
            sampling=pb.SamplingParams(top_p=1.0, max_tokens=1500, ignore_eos=True),
            block_hashes=harness.hashes(prompt_of(3)),
        )
        await deaf.write(pb.StreamRequest(submit=submit))
        await until(lambda: sim.steps >= 1400, 30)
        assert await harness.metric("reprise_scheduler_event_dropped_batches_total") > 100
        turns = "".join(map(str, map(int, marks))).split("0")[1:]
        with_plan = [turn for turn in turns if "1" in turn and "4" in turn]
        assert len(with_plan) >= 1400
        assert all(turn.index("4") < turn.index("5") < turn.index("6") for turn in with_plan)
        deaf.cancel()
        sim.stop()
    silent.close(0)


async def test_a_gateway_that_stops_reading_delays_no_token_of_another_and_misses_none() -> None:
    """Its stream's window is full, so its tokens are merged; the other's come step by step, which is
    counted in steps of the worker, not timed."""
    names = [f"d{i}" for i in range(16)]
    async with running_scheduler(async_scheduling=False, max_num_seqs=64) as harness:
        worker = ZmqWorker(
            harness.settings.workers_endpoint, num_blocks=20_000, max_model_len=2000, block_size=4
        ).start()
        await harness.wait_for_worker()
        narrow = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
        window = grpc.aio.insecure_channel(harness.settings.listen_address, options=narrow)
        deaf = await GatewaySide(harness, "deaf", EngineStub(window)).attach()
        deaf.stop_reading()
        for i, name in enumerate(names):
            deaf.submit(name, prompt_of(i), max_tokens=300)
        merged = "reprise_scheduler_merged_deltas_total"
        async with asyncio.timeout(60):
            while await harness.metric(merged) < 100:
                await asyncio.sleep(0.02)
        quick = await GatewaySide(harness, "quick").attach()
        merged_before = await harness.metric(merged)
        lags: list[int] = []
        quick.on_delta = lambda: lags.append(worker.steps - len(quick.requests["q"].token_ids))
        quick.submit("q", prompt_of(50), max_tokens=120)
        await quick.ended("q", timeout_s=60)
        assert quick.requests["q"].token_ids == expected_output(prompt_of(50), 120)
        assert await harness.metric(merged) >= merged_before + 16 * 100
        assert max(lags) - min(lags) < 30
        deaf.read_again()
        await deaf.ended(*names, timeout_s=60)
        for i, name in enumerate(names):
            assert deaf.requests[name].token_ids == expected_output(prompt_of(i), 300), name
        assert worker.failure is None
        await deaf.cut()
        await quick.cut()
        await window.close()
        worker.stop()


async def test_a_deadline_ends_a_request_wherever_it_is_and_frees_its_blocks() -> None:
    async with running_scheduler(max_num_seqs=1) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, step_delay_s=0.02).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        gateway.submit("running", prompt_of(1), max_tokens=100, timeout_s=0.4)
        gateway.submit("waiting", prompt_of(2), max_tokens=100, timeout_s=0.2)
        gateway.submit("in time", prompt_of(3), max_tokens=4, timeout_s=30.0)
        gateway.submit("odd", prompt_of(3), max_tokens=4, timeout_s=float("nan"))
        await gateway.ended("running", "waiting", "in time", "odd")
        for name, words in (("running", "within 0.4 s"), ("waiting", "within 0.2 s")):
            assert gateway.requests[name].finished.error.kind == "deadline"
            assert words in gateway.requests[name].finished.error.message
        tokens = gateway.requests["running"].token_ids
        assert 0 < len(tokens) < 100
        assert tokens == expected_output(prompt_of(1), 100)[: len(tokens)]
        assert not gateway.requests["waiting"].token_ids
        assert gateway.requests["in time"].token_ids == expected_output(prompt_of(3), 4)
        assert "timeout_s" in gateway.requests["odd"].finished.error.message
        assert await harness.metric("reprise_scheduler_deadlines_exceeded_total") == 2
        assert await harness.metric("vllm:kv_cache_usage_perc") == 0
        await gateway.cut()
        worker.stop()


async def test_a_deadline_that_passes_while_others_are_asked_ends_the_request_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokenizer for its hashes, or the store for its blocks; what they answer later changes nothing."""
    settings = {"store_address": f"127.0.0.1:{free_port()}", "max_external_wait_s": 30.0}
    async with running_scheduler(**settings) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint).start()
        await harness.wait_for_worker()
        answered = asyncio.Event()

        async def answer_late(*_: object) -> object:
            await answered.wait()
            raise Unavailable("too late")

        harness.app._external.lookup = answer_late
        monkeypatch.setattr(TokenizerClient, "hash_tokens", answer_late)
        gateway = await GatewaySide(harness).attach()
        endings: list[str] = []
        take = gateway._take
        gateway._take = lambda delta: (
            endings.extend([delta.request_id] * delta.HasField("finished")),
            take(delta),
        )
        unknown = common_pb2.ProfileHashes(profile_id="another", digests=b"")
        gateway.submit("hashing", prompt_of(1), timeout_s=0.3, block_hashes=unknown)
        gateway.submit("asking", prompt_of(2), timeout_s=0.3)
        await gateway.ended("hashing", "asking")
        for name in ("hashing", "asking"):
            assert gateway.requests[name].finished.error.kind == "deadline"
        answered.set()
        gateway.submit("next", prompt_of(3))
        await gateway.ended("next")
        assert gateway.requests["next"].token_ids == expected_output(prompt_of(3), 8)
        assert sorted(endings) == ["asking", "hashing", "next"]
        assert await harness.metric("vllm:num_requests_waiting") == 0
        assert await harness.metric("vllm:kv_cache_usage_perc") == 0
        await gateway.cut()
        worker.stop()


async def test_refusals_name_their_limit_and_when_to_come_again() -> None:
    async with running_scheduler(max_num_waiting_tokens=50, max_num_seqs=1) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, step_delay_s=0.02).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        names = [f"r{i}" for i in range(8)]
        for name in names:
            gateway.submit(name, prompt_of(1), max_tokens=10)
        await gateway.ended(*names)
        errors = [
            gateway.requests[n].finished.error for n in names if gateway.requests[n].finished.error.kind
        ]
        assert len(errors) >= 4
        for error in errors:
            assert error.kind == "exhausted"
            assert "at most 50 may" in error.message
            assert 1 <= error.retry_after_s <= 60
        reason = "max_num_queued_tokens"
        assert await harness.metric("vllm:admission_rejections_total", reason=reason) == len(errors)
        await gateway.cut()
        worker.stop()


async def test_a_hello_that_is_repeated_before_its_answer_ends_no_session() -> None:
    """A machine may be slower to answer than the worker is to ask again."""
    async with running_scheduler() as harness:
        hello = ZmqWorker(harness.settings.workers_endpoint)._hello()
        worker = RawWorker(harness.settings.workers_endpoint)
        worker.send(Kind.HELLO, hello)
        first = (await worker.receive(Kind.WELCOME)).session
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        gateway.submit("a", prompt_of(1), max_tokens=8)
        assert (await worker.receive(Kind.PLAN)).session == first
        worker.send(Kind.HELLO, hello)
        assert (await worker.receive(Kind.WELCOME)).session == first
        # Whoever lost its session says so by another number, and is told nothing of the old one.
        worker.send(Kind.HELLO, msgspec.structs.replace(hello, greeting=1))
        second = (await worker.receive(Kind.WELCOME)).session
        assert second != first
        worker.send(Kind.HEARTBEAT, Heartbeat(last_step_id=0, busy=False), session=first)
        assert (await worker.receive(Kind.STALE)).session == first
        # Plans that went to another connection are lost, and their session with it.
        await until(lambda: harness.app._link._plans_sent > 0)
        again = RawWorker(harness.settings.workers_endpoint)
        again.send(Kind.HELLO, msgspec.structs.replace(hello, greeting=1))
        assert (await again.receive(Kind.WELCOME)).session not in (first, second)
        assert await harness.metric("reprise_scheduler_worker_sessions_total") == 3
        await gateway.cut()
        worker.close()
        again.close()


class RawWorker:
    """A connection as a worker has it, message by message."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def send(self, kind: Kind, body: Body, *, session: bytes = b"") -> None:
        self._socket.send_multipart(encode(kind, body, session=session))

    async def receive(self, kind: Kind) -> Header:
        """The next message of that kind."""
        async with asyncio.timeout(10):
            while (header := decode_header(await self._socket.recv_multipart())).kind != kind:
                pass
        return header

    def close(self) -> None:
        self._socket.close(0)
