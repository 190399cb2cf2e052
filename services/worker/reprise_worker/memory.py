"""How many blocks fit the memory budget."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from reprise_core.errors import InvalidInput
from reprise_worker import attention
from reprise_worker.batch import MAX_GROUP_TOKENS, ScheduledTokens, make_batch
from reprise_worker.kv_cache import KvCache, block_nbytes
from reprise_worker.layer_groups import LayerGroup
from reprise_worker.model import PagedModel
from reprise_worker.request_state import IdList, RequestState
from reprise_worker.settings import GIB, WorkerSettings

_CPU_SHARE = 4
_CPU_LIMIT_BYTES = 4 * GIB
_SCRATCH_BLOCKS = 64


def pool_size(
    settings: WorkerSettings,
    model: PagedModel,
    groups: Sequence[LayerGroup],
    backend: attention.AttentionBackend,
) -> int:
    """Blocks of the pool, the null block included."""
    if settings.num_blocks == 1:
        raise InvalidInput("num_blocks", "1 leaves no block beside the null block; allowed: 0 or at least 2")
    if settings.num_blocks:
        return settings.num_blocks
    per_block = block_nbytes(model.layers, groups, settings.block_size, model.dtype)
    budget = settings.kv_memory_bytes or automatic_budget(settings, model, backend)
    num_blocks = budget // per_block
    if num_blocks < 2:
        raise InvalidInput(
            "kv_memory_bytes",
            f"{budget} bytes hold {num_blocks} blocks of {per_block} bytes; at least 2 needed",
        )
    return num_blocks


def automatic_budget(settings: WorkerSettings, model: PagedModel, backend: attention.AttentionBackend) -> int:
    if model.device.type == "cuda":
        return _cuda_budget(settings, model, backend)
    return min(available_bytes() // _CPU_SHARE, _CPU_LIMIT_BYTES)


def available_bytes() -> int:
    """Memory that a process may still take: the machine's, or what its control group leaves."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return free
    return min(free, max(0, limit - used))


def _cuda_budget(settings: WorkerSettings, model: PagedModel, backend: attention.AttentionBackend) -> int:
    """The device's share less what others hold, the weights, and the peak of a full step."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    _run_full_step(settings, model, backend)
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    of_others = total - free - torch.cuda.memory_reserved(model.device)
    return max(0, int(total * settings.gpu_memory_utilization) - of_others - peak)


def _run_full_step(settings: WorkerSettings, model: PagedModel, backend: attention.AttentionBackend) -> None:
    """A step of as many tokens as allowed, at the end of sequences as long as allowed, beside as many decodes
    as attention takes at once. It runs over a scratch cache of few blocks, used again and again: what is
    written there does not matter."""
    step_tokens = settings.step_tokens(on_cuda=model.device.type == "cuda")
    longest = settings.max_model_len or model.max_model_len or step_tokens
    kv = KvCache(
        model.layers,
        num_blocks=_SCRATCH_BLOCKS,
        block_size=settings.block_size,
        dtype=model.dtype,
        device=model.device,
    )
    table = np.resize(np.arange(1, kv.num_blocks), -(-longest // settings.block_size))
    state = RequestState.scratch(tokens=IdList(np.zeros(longest, dtype=np.int64)), blocks=IdList(table))
    items = []
    for start in range(0, step_tokens, longest):
        num_new = min(longest, step_tokens - start)
        items.append(ScheduledTokens(state, longest - num_new, num_new, True))
    items += [ScheduledTokens(state, longest - 1, 1, True)] * max(1, MAX_GROUP_TOKENS // longest)
    model.forward(make_batch(items, block_size=settings.block_size, device=model.device), kv, backend)
