"""Sessions end and begin in the middle of streams, and somebody stops reading: nobody's answer changes.

One system; what a service is restarted with is read from its own environment, while the supervisor is
stopped so that it does not restart it itself.
"""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from support.answer_stream import AnswerStream, check_answers
from support.system import System, start_system
from support.valkey_server import free_port
from support.waiting import until_blocking

NUM_TOKENS = 30
STARTS = ("In the harbour", "Seven wizards", "The engine room", "A garden of", "Once more")
PROMPTS = [f"{start} of the old town there was a clock that nobody could stop, and" for start in STARTS]
STEPS = "vllm:iteration_tokens_total_count"


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Four at once, so that the fifth waits; a worker is missed after 2 s; no store, so that what is
    cached is what this engine has."""
    running = start_system(
        tmp_path_factory.mktemp("busy"),
        *("--max-num-seqs", "4", "--no-redis", "--kv-transfer-config", "{}"),
        environment={"REPRISE_SCHEDULER_WORKER_TIMEOUT_S": "2"},
    )
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def cleared_events(system: System) -> Iterator[list[str]]:
    """On leaving, the types of the events since, the list ending with the last `AllBlocksCleared`."""
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
    subscriber.connect(system.endpoints["engines"][0]["events"])
    seen: list[str] = []
    yield seen

    def cleared() -> bool:
        while subscriber.poll(0):
            _, _, payload = subscriber.recv_multipart()
            seen.extend(event["type"] for event in msgspec.msgpack.decode(payload)[1])
        return "AllBlocksCleared" in seen

    until_blocking(cleared, 30)
    context.destroy(0)


def all_ready(system: System) -> bool:
    try:
        for url in system.endpoints["metrics"].values():
            urllib.request.urlopen(url.replace("/metrics", "/readyz"), timeout=2).close()
    except OSError:
        return False
    return True


def started(streams: list[AnswerStream], num_tokens: int = 5) -> bool:
    return all(stream.has(num_tokens) for stream in streams)


@contextmanager
def own_process(system: System, name: str, **changed: object) -> Iterator[subprocess.Popen[bytes]]:
    """Another process of that service, with some of its settings changed."""
    environment = dict(
        pair.split("=", 1)
        for pair in Path(f"/proc/{system.child_pids()[name]}/environ").read_text().split("\0")
        if "=" in pair
    )
    environment[f"REPRISE_{name.upper()}_METRICS_ADDRESS"] = f"127.0.0.1:{free_port()}"
    environment |= {f"REPRISE_{name.upper()}_{key.upper()}": str(value) for key, value in changed.items()}
    with (system.folder / f"own-{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", f"reprise_{name}"], env=environment, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def nobody_restarts(system: System) -> Iterator[None]:
    system.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        system.process.send_signal(signal.SIGCONT)


def test_a_scheduler_killed_under_a_living_worker(busy: System) -> None:
    """Started streams go on from prompt and tokens so far, the one that waits begins."""
    for prompt in (PROMPTS[0], PROMPTS[4]):
        assert busy.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})[0] == 200
    before = busy.child_pids()
    with cleared_events(busy):
        streams = [AnswerStream(busy.url, prompt, NUM_TOKENS) for prompt in PROMPTS[:4]]
        until_blocking(lambda: started(streams), 60)
        streams.append(AnswerStream(busy.url, PROMPTS[4], NUM_TOKENS))
        until_blocking(lambda: busy.metric("vllm:num_requests_waiting") == 1)
        shown = sum(len(stream.output_ids) for stream in streams)
        assert not streams[4].output_ids
        os.kill(before["scheduler"], signal.SIGKILL)
        check_answers(busy, PROMPTS, streams, NUM_TOKENS)
    after = busy.child_pids()
    assert after["scheduler"] != before["scheduler"]
    assert after["worker"] == before["worker"]
    # What was reused when each was admitted first: the fifth met an engine that had nothing.
    cached = [stream.usage["prompt_tokens_details"]["cached_tokens"] for stream in streams]
    assert cached == [16, 0, 0, 0, 0]
    # Tokens of before are not generated again.
    assert busy.metric("vllm:generation_tokens_total") <= 5 * NUM_TOKENS - shown
    assert busy.metric("reprise_gateway_resubmissions_total") >= 5


def test_a_worker_stopped_for_a_while(busy: System) -> None:
    """Its late results belong to a session that is over."""
    until_blocking(lambda: all_ready(busy), 60)
    lost = busy.metric("reprise_scheduler_worker_losses_total")
    stale = busy.metric("reprise_scheduler_worker_stale_messages_total")
    with cleared_events(busy):
        streams = [AnswerStream(busy.url, prompt, NUM_TOKENS) for prompt in PROMPTS[:3]]
        until_blocking(lambda: started(streams), 60)
        worker = busy.child_pids()["worker"]
        os.kill(worker, signal.SIGSTOP)
        until_blocking(lambda: busy.metric("reprise_scheduler_worker_losses_total") > lost, 30)
        assert busy.metric("vllm:kv_cache_usage_perc") == 0
        os.kill(worker, signal.SIGCONT)
        check_answers(busy, PROMPTS[:3], streams, NUM_TOKENS)
    assert busy.metric("reprise_scheduler_worker_stale_messages_total") > stale
    assert busy.child_pids()["worker"] == worker


def test_a_worker_killed_and_back_with_another_capacity(busy: System) -> None:
    """Fewer blocks than the four that ran held; and afterwards the first capacity again."""
    until_blocking(lambda: all_ready(busy), 60)
    with cleared_events(busy):
        streams = [AnswerStream(busy.url, prompt, NUM_TOKENS) for prompt in PROMPTS[:4]]
        until_blocking(lambda: started(streams), 60)
        with nobody_restarts(busy), own_process(busy, "worker", num_blocks=10):
            os.kill(busy.child_pids()["worker"], signal.SIGKILL)
            check_answers(busy, PROMPTS[:4], streams, NUM_TOKENS)
            assert busy.metric("vllm:cache_config_info", num_gpu_blocks="10") == 1
    until_blocking(lambda: all_ready(busy), 60)


def test_one_who_reads_nothing_and_a_stopped_gateway_delay_nobody(busy: System) -> None:
    """In steps: each token of another client takes one, whoever does not read."""
    until_blocking(lambda: all_ready(busy), 60)
    port = free_port()
    with own_process(busy, "gateway", listen_address=f"127.0.0.1:{port}") as gateway:
        url = f"http://127.0.0.1:{port}"
        until_blocking(lambda: answers(url), 60)
        deaf = AnswerStream(busy.url, PROMPTS[1], 4 * NUM_TOKENS, read=False)
        beyond = AnswerStream(url, PROMPTS[2], 4 * NUM_TOKENS)
        until_blocking(lambda: started([beyond]), 60)
        gateway.send_signal(signal.SIGSTOP)
        steps = busy.metric(STEPS)
        quick = AnswerStream(busy.url, PROMPTS[3], NUM_TOKENS)
        quick.join()
        assert busy.metric("vllm:num_requests_running") == 2  # the two who do not read go on
        assert busy.metric(STEPS) - steps < 2 * NUM_TOKENS
        check_answers(busy, [PROMPTS[3]], [quick], NUM_TOKENS)
        gateway.send_signal(signal.SIGCONT)
        deaf.read_on()
        check_answers(busy, PROMPTS[1:3], [deaf, beyond], 4 * NUM_TOKENS)
    until_blocking(lambda: busy.metric("vllm:kv_cache_usage_perc") == 0)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False
