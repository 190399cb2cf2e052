"""The worker process on the device, between a scheduler's and a store's end of the wire."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from reprise_core.ids import BlockHash, GroupId
from reprise_core.steps import (
    AddedRequest,
    BlockLoad,
    BlockSave,
    LoadReport,
    ScheduledRequest,
    StepPlan,
    WorkerSampling,
    pack_ids,
    unpack_ids,
)
from reprise_wire.block_transfer import TransferKind
from support.gpu import DEVICE, ON_CUDA, needs_device
from support.tiny_models import paged, plain_greedy, small_config, small_model, write_model_folder
from support.worker_peers import SchedulerPeer, StorePeer
from support.worker_process import WorkerProcess

pytestmark = needs_device
GREEDY = WorkerSampling(0.0, 1.0, 0, None)
PROMPT = [5, 60, 7, 41, 33, 8, 90, 12, 13]
HASHES = (BlockHash(b"a" * 32), BlockHash(b"b" * 32))
START_S = 180.0


@pytest.fixture
def scheduler() -> Iterator[SchedulerPeer]:
    peer = SchedulerPeer()
    yield peer
    peer.close()


@pytest.fixture
def store() -> Iterator[StorePeer]:
    peer = StorePeer()
    yield peer
    peer.close()


def generate(
    scheduler: SchedulerPeer, first_step: int, handle: int, blocks: list[int], computed: int = 0
) -> list[int]:
    """Adds the request and decodes six tokens; one plan at a time."""
    added = AddedRequest(handle, pack_ids(PROMPT), len(PROMPT), computed, (pack_ids(blocks),), GREEDY)
    entry = ScheduledRequest(handle, computed, len(PROMPT) - computed, (), True)
    tokens = unpack_ids(scheduler.run(StepPlan(first_step, added=(added,), scheduled=(entry,))).token_ids)
    for index in range(1, 6):
        entry = ScheduledRequest(handle, len(PROMPT) + index - 1, 1, (), True)
        tokens += unpack_ids(scheduler.run(StepPlan(first_step + index, scheduled=(entry,))).token_ids)
    return tokens


def test_a_session_with_saves_and_loads(tmp_path: Path, scheduler: SchedulerPeer, store: StorePeer) -> None:
    folder = write_model_folder(tmp_path / "model")
    expected = plain_greedy(paged(small_model(small_config("Llama"))), PROMPT, 6)
    settings = {
        "device": DEVICE.type,
        "dtype": "float32",
        "block_size": 4,
        "num_blocks": 32,
        "scheduler_endpoint": scheduler.endpoint,
        "store_endpoint": store.endpoint,
    }
    with WorkerProcess(folder, tmp_path, **settings) as worker:
        hello = scheduler.welcome(timeout_s=START_S)
        assert hello.capacity.num_blocks == 32
        assert hello.capacity.max_num_batched_tokens == (8192 if ON_CUDA else 512)
        assert generate(scheduler, 1, 1, [7, 3, 9, 2]) == expected
        # Saved in the same plan that gives the blocks to another request.
        pairs = zip([7, 3], HASHES, strict=True)
        saves = tuple(BlockSave(GroupId(0), block, block_hash, 4) for block, block_hash in pairs)
        other = AddedRequest(2, pack_ids([9] * 8), 8, 0, (pack_ids([7, 3]),), GREEDY)
        step = ScheduledRequest(2, 0, 8, (), True)
        scheduler.run(StepPlan(7, removed=(1,), saves=saves, added=(other,), scheduled=(step,)))
        assert store.serve_one().kind == TransferKind.SAVE
        scheduler.run(StepPlan(8, loads=(BlockLoad(3, 0, pack_ids([11, 12]), HASHES, 4),)))
        assert store.serve_one().kind == TransferKind.LOAD
        assert scheduler.wait_for_loads() == (LoadReport(3, 0),)
        assert generate(scheduler, 9, 3, [11, 12, 13, 14], computed=8) == expected
        assert "reprise_worker_loads_total 2.0" in worker.get("/metrics")
        assert worker.terminate(30.0) == 0


@pytest.mark.skipif(not ON_CUDA, reason="measures a GPU")
def test_the_pool_is_measured(tmp_path: Path, scheduler: SchedulerPeer) -> None:
    folder = write_model_folder(tmp_path / "model")
    gc.collect()
    torch.cuda.empty_cache()  # what this process keeps is another's to the worker
    share = {"device": "cuda", "gpu_memory_utilization": 0.25, "scheduler_endpoint": scheduler.endpoint}
    with WorkerProcess(folder, tmp_path, **share) as worker:
        hello = scheduler.welcome(timeout_s=START_S)
        pool_nbytes = hello.capacity.num_blocks * hello.capacity.block_nbytes
        assert 1 << 30 < pool_nbytes < torch.cuda.mem_get_info()[1] // 4
        assert hello.model.dtype == "float32"
        assert generate(scheduler, 1, 1, [hello.capacity.num_blocks - 1, 3]) == plain_greedy(
            paged(small_model(small_config("Llama"))), PROMPT, 6
        )
        assert worker.terminate(30.0) == 0
