"""The budget of the pool on a GPU: its share, what others hold, and that a full step then fits."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from reprise_worker.attention import TorchAttention
from reprise_worker.batch import ScheduledTokens, make_batch
from reprise_worker.kv_cache import KvCache
from reprise_worker.layer_groups import group_layers
from reprise_worker.memory import automatic_budget, pool_size
from reprise_worker.model import PagedModel
from reprise_worker.request_state import IdList, RequestState
from reprise_worker.sampler import Draw, sample
from reprise_worker.settings import GIB, MIB, WorkerSettings
from support.gpu import DEVICE, ON_CUDA, needs_device, random_llama
from support.tiny_models import paged

pytestmark = [needs_device, pytest.mark.skipif(not ON_CUDA, reason="measures a GPU")]
SHARE = 0.5
STEP_TOKENS = 8192
LONGEST = 32_768


@pytest.fixture
def model() -> Iterator[PagedModel]:
    gc.collect()
    torch.cuda.empty_cache()
    yield paged(random_llama(dtype=torch.bfloat16), DEVICE)
    gc.collect()
    torch.cuda.empty_cache()


def settings(**more: object) -> WorkerSettings:
    return WorkerSettings(model_path="x", gpu_memory_utilization=SHARE, **more)  # type: ignore[arg-type]


def full_steps(num_blocks: int) -> Iterator[list[ScheduledTokens]]:
    """A fresh prompt as long as a step, the last part of the longest one, and 256 decodes."""

    def request(num_tokens: int, first: int) -> RequestState:
        blocks = [1 + (first + index) % (num_blocks - 1) for index in range(-(-num_tokens // 16))]
        return RequestState.scratch(tokens=IdList([7] * num_tokens), blocks=IdList(blocks))

    yield [ScheduledTokens(request(STEP_TOKENS, num_blocks // 2), 0, STEP_TOKENS, True)]
    yield [ScheduledTokens(request(LONGEST, num_blocks // 3), LONGEST - STEP_TOKENS, STEP_TOKENS, True)]
    yield [ScheduledTokens(request(1500, 100 * row), 1499, 1, True) for row in range(256)]


def test_the_pool_and_full_steps_fit_the_share(model: PagedModel) -> None:
    chosen, groups, backend = settings(), group_layers(model.layers, model.windows), TorchAttention()
    num_blocks = pool_size(chosen, model, groups, backend)
    free, total = torch.cuda.mem_get_info()
    of_others = total - free - torch.cuda.memory_reserved()
    kv = KvCache(
        model.layers, groups=groups, num_blocks=num_blocks, block_size=16, dtype=model.dtype, device=DEVICE
    )
    torch.cuda.reset_peak_memory_stats()
    for items in full_steps(num_blocks):
        logits = model.forward(make_batch(items, block_size=16, device=DEVICE), kv, backend)
        assert torch.isfinite(logits).all()
        sample(logits, [Draw(temperature=1.0, top_p=0.9, seed=row) for row in range(len(logits))])
        print(
            f"{len(items)} requests: peak {torch.cuda.max_memory_allocated() / GIB:.2f}"
            f" reserved {torch.cuda.max_memory_reserved() / GIB:.2f} GiB"
        )
    share = SHARE * total
    peak = torch.cuda.max_memory_allocated() + of_others
    print(f"share {share / GIB:.2f} peak {peak / GIB:.2f} pool {num_blocks * kv.block_nbytes / GIB:.2f} GiB")
    # Little is left unused, and what sampling takes is not measured: it comes out of the rest.
    assert 0.97 * share < peak < share + 1 * GIB
    assert torch.cuda.max_memory_reserved() + of_others < share + 0.03 * total


_HOLD = """
import sys, torch
held = torch.empty({nbytes}, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


def test_what_another_process_holds_is_not_ours(model: PagedModel) -> None:
    backend = TorchAttention()
    alone = automatic_budget(settings(), model, backend)
    held = torch.cuda.mem_get_info()[1] // 8
    program = _HOLD.format(nbytes=held)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        beside = automatic_budget(settings(), model, backend)
        other.communicate("")
    # The other process's context counts too.
    assert held <= alone - beside < held + 2 * GIB
    assert abs(automatic_budget(settings(), model, backend) - alone) < 512 * MIB


def test_the_longest_sequence_is_part_of_what_is_measured(model: PagedModel) -> None:
    backend = TorchAttention()
    short = automatic_budget(settings(max_model_len=2048), model, backend)
    assert automatic_budget(settings(), model, backend) < short
