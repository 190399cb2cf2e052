"""Our paged path against plain transformers in the same run, and block copies against bare ones.

`python tests/gpu/measure.py [--profile FOLDER]`, with PYTHONPATH as `tests/gpu/run.sh` sets it. A Llama of
1.2 billion random weights in bfloat16; the same prompts and greedy tokens on both sides.
"""

import argparse
import mmap
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from reprise_wire.block_transfer import Keyspace
from reprise_worker.kv_cache import KvCache
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.model import PagedModel
from reprise_worker.transfer import TransferLimits, Transfers
from support.gpu import DEVICE, ON_CUDA, random_llama
from support.runner_driver import Driver, block_save
from support.tiny_models import paged

BLOCK_SIZE = 16
NUM_PROMPT = 512 if ON_CUDA else 32
NUM_OUTPUT = 128 if ON_CUDA else 8
BATCHES = (1, 16, 64) if ON_CUDA else (1, 2)
STEP_TOKENS = 8192
NUM_BLOCKS_COPIED = 400 if ON_CUDA else 20


Run = tuple[float, float, list[list[int]]]
"""Prefill seconds, decode seconds, tokens."""


def synchronize() -> None:
    if ON_CUDA:
        torch.cuda.synchronize()


def timed(work: Callable[[], object], repeats: int = 3) -> float:
    """Seconds, the median, after a warm-up."""
    work()
    taken = []
    for _ in range(repeats):
        synchronize()
        started_s = time.perf_counter()
        work()
        synchronize()
        taken.append(time.perf_counter() - started_s)
    return statistics.median(taken)


@torch.inference_mode()
def plain(hf: Any, prompts: torch.Tensor, num_output: int) -> Run:
    """Torch's attention, transformers' own growing cache."""
    hf.set_attn_implementation("sdpa")
    synchronize()
    started_s = time.perf_counter()
    output = hf(input_ids=prompts, use_cache=True, logits_to_keep=1)
    tokens = output.logits[:, -1].argmax(dim=-1, keepdim=True)
    tokens.tolist()
    middle_s = time.perf_counter()
    answers = [tokens]
    for _ in range(num_output - 1):
        output = hf(input_ids=tokens, past_key_values=output.past_key_values, use_cache=True)
        tokens = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        tokens.tolist()  # a server has to send it
        answers.append(tokens)
    ended_s = time.perf_counter()
    return middle_s - started_s, ended_s - middle_s, torch.cat(answers, dim=1).tolist()


def ours(
    model: PagedModel, prompts: list[list[int]], num_output: int
) -> tuple[float, float, list[list[int]]]:
    """The same by step plans; prompts in steps of at most `STEP_TOKENS` tokens."""
    per_request = -(-(len(prompts[0]) + num_output) // BLOCK_SIZE)
    driver = Driver(model, num_blocks=1 + per_request * len(prompts), block_size=BLOCK_SIZE)
    model.hf.set_attn_implementation("reprise_paged")
    at_once = max(1, STEP_TOKENS // len(prompts[0]))
    synchronize()
    started_s = time.perf_counter()
    for handle, prompt in enumerate(prompts):
        driver.add(handle, prompt)
        if (handle + 1) % at_once == 0 or handle + 1 == len(prompts):
            driver.step({new: len(prompt) for new in range(handle // at_once * at_once, handle + 1)})
    middle_s = time.perf_counter()
    for _ in range(num_output - 1):
        driver.step(dict.fromkeys(range(len(prompts)), 1))
    ended_s = time.perf_counter()
    return middle_s - started_s, ended_s - middle_s, [driver.output(handle) for handle in driver.tokens]


def measure_model(model: PagedModel) -> None:
    print(f"\nprompts of {NUM_PROMPT} tokens, {NUM_OUTPUT} tokens out, tokens/s")
    print("batch |  prefill plain    ours  ratio |  decode plain    ours  ratio | same tokens")
    for batch in BATCHES:
        prompts = torch.randint(3, 32_000, (batch, NUM_PROMPT), device=DEVICE)
        lists = prompts.tolist()
        rates = {}
        for name, run in (
            ("plain", lambda: plain(model.hf, prompts, NUM_OUTPUT)),  # noqa: B023
            ("ours", lambda: ours(model, lists, NUM_OUTPUT)),  # noqa: B023
        ):
            run()
            runs = [run() for _ in range(3)]
            prefill_s, decode_s = (statistics.median(item[index] for item in runs) for index in (0, 1))
            rates[name] = (
                batch * NUM_PROMPT / prefill_s,
                batch * (NUM_OUTPUT - 1) / decode_s,
                runs[0][2],
            )
        (prefill, decode, expected), (our_prefill, our_decode, tokens) = rates["plain"], rates["ours"]
        same = int((torch.tensor(tokens) == torch.tensor(expected)).sum())
        print(
            f"{batch:5} | {prefill:14.0f} {our_prefill:7.0f} {our_prefill / prefill:6.2f}"
            f" | {decode:13.0f} {our_decode:7.0f} {our_decode / decode:6.2f}"
            f" | {same / (batch * NUM_OUTPUT):.0%}"
        )


def measure_copies(model: PagedModel) -> None:
    num = NUM_BLOCKS_COPIED
    kv = KvCache(
        model.layers, num_blocks=num + 1, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device
    )
    kv._slabs.normal_()
    size = kv.block_nbytes
    limits = TransferLimits((num + 1) * (size + 4096), 32, 64, 64, 5.0, 30.0)
    transfers = Transfers(
        kv,
        keyspace=Keyspace("measure", "ab" * 16),
        rank=0,
        limits=limits,
        metrics=WorkerMetrics(CollectorRegistry()),
        report=lambda session, report: None,
        shared_memory=False,
    )
    staging = transfers._staging
    host = torch.empty((num, size), dtype=torch.uint8, pin_memory=ON_CUDA)
    on_device = kv._bytes[1 : num + 1]
    saves = [block_save(block, block.to_bytes(32, "big")) for block in range(1, num + 1)]
    value = memoryview(host[0].numpy().tobytes())

    def stage() -> None:
        transfers._saves._staged.clear()
        staging.give_back([row for row in range(staging.num_rows) if row not in staging._free])
        assert transfers.save(saves) == 0

    def load() -> None:
        for block in range(1, num + 1):
            kv.import_block(block, value)

    print(f"\n{num} blocks of {size >> 10} KiB, GB/s")
    for name, work in {
        "device to host: bare, one copy": lambda: host.copy_(on_device, non_blocking=True),
        "device to host: bare, block by block": lambda: [
            host[n].copy_(on_device[n], non_blocking=True) for n in range(num)
        ],
        "device to host: a save into staging": stage,
        "host to device: bare, one copy": lambda: on_device.copy_(host, non_blocking=True),
        "host to device: bare, block by block": lambda: [
            on_device[n].copy_(host[n], non_blocking=True) for n in range(num)
        ],
        "host to device: a load's writes": load,
    }.items():
        print(f"  {name:40} {num * size / timed(work) / 1e9:6.1f}")


def try_shared_pinned(num_bytes: int = 64 << 20) -> None:
    """Whether memory that another process may map can be pinned here."""
    mapped = mmap.mmap(-1, num_bytes)
    tensor = torch.frombuffer(mapped, dtype=torch.uint8)
    status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), num_bytes, 0)  # type: ignore[attr-defined]
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
    rate = num_bytes / timed(lambda: tensor.copy_(source, non_blocking=True)) / 1e9
    print(f"\nregistered shared memory: {status}, pinned {tensor.is_pinned()}, {rate:.1f} GB/s")


def profile(model: PagedModel, folder: Path) -> None:
    """What one decode step spends, as tables of torch's profiler."""
    for batch in (1, 64):
        prompts = torch.randint(3, 32_000, (batch, NUM_PROMPT)).tolist()
        ours(model, prompts, 3)
        with torch.profiler.profile() as recorded:
            ours(model, prompts, 12)
        events = recorded.key_averages()
        for key in ("self_cuda_time_total", "self_cpu_time_total"):
            text = events.table(sort_by=key, row_limit=40, max_name_column_width=70)
            (folder / f"profile_{batch}_{key}.txt").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", type=Path)
    chosen = parser.parse_args()
    name = torch.cuda.get_device_name() if ON_CUDA else "CPU"
    print(f"{name}, torch {torch.__version__}")
    shape = (
        {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "initializer_range": 0.02}
        if ON_CUDA
        else {}
    )
    model = paged(random_llama(dtype=torch.bfloat16, **shape), DEVICE)
    print(f"{sum(weights.numel() for weights in model.hf.parameters()) / 1e9:.2f} billion weights")
    measure_model(model)
    measure_copies(model)
    if ON_CUDA:
        try_shared_pinned()
    if chosen.profile is not None:
        profile(model, chosen.profile)


if __name__ == "__main__":
    main()
