"""`reprise bench split`: what taking the engine apart costs in generation throughput.

The scheduler and the worker as processes, joined by ZMQ, events drained, a client that drains the
gRPC stream; against the same scheduler and worker in one process, joined by memory. Same model, same
prompts, in turn; both stay up and the one that is not measured is idle.
"""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from reprise_cli.bench.report import BenchRow
from reprise_cli.ports import free_ports
from reprise_core.errors import ErrorKind, RepriseError
from reprise_core.requests import FinishReason, SamplingParams
from reprise_runtime.grpc_server import channel
from reprise_wire.clients.engine import EngineCall, EngineClient, EngineInfo, Submission
from reprise_wire.error_codec import PeerError
from reprise_wire.hash_profiles import ProfileHashes
from reprise_worker.settings import WorkerSettings

NUM_REQUESTS = 8
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 48
NUM_BLOCKS = 1024
REPEATS = 9
START_TIMEOUT_S = 180.0
TARGET = 0.95
Round = Callable[[int], Awaitable[float]]
_LARGEST_ID = 20_000


def prompts(round_number: int) -> list[list[int]]:
    """New ones in every round, so that none is found in the prefix cache; the same for both sides."""
    rng = random.Random(round_number)
    return [[rng.randrange(10, _LARGEST_ID) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_REQUESTS)]


def split_rows(*, repeats: int = REPEATS, model_path: Path | None = None) -> list[BenchRow]:
    from reprise_cli.serve.command import default_cache_dir, prepare_model

    path = model_path or prepare_model("", default_cache_dir())
    seconds = asyncio.run(_measure(path, repeats))
    num_tokens = NUM_REQUESTS * OUTPUT_TOKENS
    rates = {name: num_tokens / median(values) for name, values in seconds.items()}
    # Pairs of one round met the same noise.
    shares = sorted(single / split for split, single in zip(seconds["split"], seconds["single"], strict=True))
    split, single = rates["split"], rates["single"]
    return [
        BenchRow("generation, one process", single, "tokens/s"),
        BenchRow.higher_is_better("generation, split", split, "tokens/s", "one process", single),
        BenchRow.higher_is_better("share, median of pairs", median(shares), "", "target", TARGET),
        BenchRow("share, lowest pair", shares[0], ""),
        BenchRow("share, highest pair", shares[-1], ""),
    ]


async def _measure(model_path: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds per round; the first round counts for nothing."""
    seconds: dict[str, list[float]] = {"split": [], "single": []}
    with ExitStack() as stack:
        single = await _start_single(stack, model_path)
        split = await _start_split(stack, model_path)
        for number in range(repeats + 1):
            # Whoever goes second may find the machine warmer: they take turns at that too.
            order: list[tuple[str, Round]] = [("split", split), ("single", single)]
            for name, run in order if number % 2 else reversed(order):
                took = await run(number)
                if number:
                    seconds[name].append(took)
    return seconds


# -- one process ------------------------------------------------------------------------------------


async def _start_single(stack: ExitStack, model_path: Path) -> Round:
    # As the worker service sets it for itself before torch is loaded.
    spin = {"GOMP_SPINCOUNT": str(WorkerSettings.model_fields["gomp_spincount"].default)}
    command = ("reprise_cli.bench.split_single", str(model_path))
    process = stack.enter_context(_process(spin, *command, pipes=True))
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    async with asyncio.timeout(START_TIMEOUT_S):
        while (line := await asyncio.to_thread(stdout.readline)).strip() != b"ready":
            assert line, "the one-process engine did not start"

    async def run(number: int) -> float:
        stdin.write(f"{number}\n".encode())
        stdin.flush()
        return float(await asyncio.to_thread(stdout.readline))

    return run


# -- the split --------------------------------------------------------------------------------------


async def _start_split(stack: ExitStack, model_path: Path) -> Round:
    grpc, workers, intake, scheduler_metrics, worker_metrics = (f"127.0.0.1:{port}" for port in free_ports(5))
    scheduler = {
        "LISTEN_ADDRESS": grpc,
        "METRICS_ADDRESS": scheduler_metrics,
        "WORKERS_ENDPOINT": f"tcp://{workers}",
        "PUBLISHER_ENDPOINT": f"tcp://{intake}",
        "LOG_LEVEL": "warning",
    }
    worker = {
        "MODEL_PATH": str(model_path),
        "METRICS_ADDRESS": worker_metrics,
        "SCHEDULER_ENDPOINT": f"tcp://{workers}",
        "STORE_ENDPOINT": "",
        "NUM_BLOCKS": str(NUM_BLOCKS),
        "LOG_LEVEL": "warning",
    }
    stack.enter_context(_process({}, "reprise_cli.bench.event_drain", f"tcp://{intake}"))
    stack.enter_context(_process(_prefixed("SCHEDULER", scheduler), "reprise_scheduler"))
    stack.enter_context(_process(_prefixed("WORKER", worker), "reprise_worker"))
    client = EngineClient(channel(grpc))
    info = await _wait_for(client)
    call = await client.attach("bench", {}, timeout_s=5.0)

    async def run(number: int) -> float:
        return await _round(call, info, number)

    return run


async def _wait_for(client: EngineClient) -> EngineInfo:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return await client.info()
        except RepriseError:
            if time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(0.1)


async def _round(call: EngineCall, info: EngineInfo, number: int) -> float:
    submissions = [_submission(info, number, i, prompt) for i, prompt in enumerate(prompts(number))]
    left = {submission.request_id for submission in submissions}
    num_tokens = 0
    start_s = time.perf_counter()
    for submission in submissions:
        await call.submit(submission)
    while left:
        deltas = await call.read()
        if deltas is None:
            raise PeerError(ErrorKind.UNAVAILABLE, "the scheduler ended the stream")
        for delta in deltas:
            num_tokens += len(delta.token_ids)
            if delta.ending is not None:
                assert delta.ending.reason is FinishReason.LENGTH, delta.ending.error
                left.remove(delta.request_id)
    seconds = time.perf_counter() - start_s
    assert num_tokens == NUM_REQUESTS * OUTPUT_TOKENS
    return seconds


def _submission(info: EngineInfo, number: int, i: int, prompt: Sequence[int]) -> Submission:
    chain = info.hash_profile.hasher().chain()
    chain.append(prompt)
    return Submission(
        request_id=f"{number}-{i}",
        token_ids=prompt,
        sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True),
        block_hashes=ProfileHashes(info.hash_profile.profile_id, b"".join(chain.hashes)),
    )


def _prefixed(service: str, values: Mapping[str, str]) -> dict[str, str]:
    return {f"REPRISE_{service}_{name}": value for name, value in values.items()}


@contextmanager
def _process(
    environment: Mapping[str, str], module: str, *arguments: str, pipes: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE if pipes else None
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **environment},
        stdin=pipe,
        stdout=pipe if pipes else subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
