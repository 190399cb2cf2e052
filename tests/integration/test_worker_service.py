"""The worker process, between a scheduler's and a store's end of the wire."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

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
from reprise_wire.step_codec import PROTOCOL_VERSION, Kind, Refused, Stale
from support.tiny_models import paged, plain_greedy, small_config, small_model, write_model_folder
from support.worker_peers import SchedulerPeer, StorePeer
from support.worker_process import WorkerProcess

GREEDY = WorkerSampling(0.0, 1.0, 0, None)
PROMPT = [5, 60, 7, 41, 33, 8, 90, 12, 13]
HASHES = (BlockHash(b"a" * 32), BlockHash(b"b" * 32))
SETTINGS = {"block_size": 4, "num_blocks": 32, "model_name": "tiny"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return plain_greedy(paged(small_model(small_config("Llama"))), PROMPT, 6)


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


def added(handle: int, blocks: list[int], num_computed: int = 0) -> AddedRequest:
    return AddedRequest(handle, pack_ids(PROMPT), len(PROMPT), num_computed, (pack_ids(blocks),), GREEDY)


def generate(
    scheduler: SchedulerPeer,
    first_step: int,
    handle: int,
    blocks: list[int],
    *,
    computed: int = 0,
    count: int = 6,
) -> list[int]:
    """Adds the request, computes the rest of its prompt, and decodes; one plan at a time."""
    entry = ScheduledRequest(handle, computed, len(PROMPT) - computed, (), True)
    plan = StepPlan(first_step, added=(added(handle, blocks, computed),), scheduled=(entry,))
    tokens = unpack_ids(scheduler.run(plan).token_ids)
    for index in range(1, count):
        entry = ScheduledRequest(handle, len(PROMPT) + index - 1, 1, (), True)
        tokens += unpack_ids(scheduler.run(StepPlan(first_step + index, scheduled=(entry,))).token_ids)
    return tokens


def test_one_request_by_plans(
    folder: Path, tmp_path: Path, scheduler: SchedulerPeer, expected: list[int]
) -> None:
    with WorkerProcess(folder, tmp_path, scheduler_endpoint=scheduler.endpoint, **SETTINGS) as worker:
        hello = scheduler.welcome()
        assert hello.model.name == "tiny"
        assert hello.model.eos_token_ids == (2,)
        assert (hello.model.max_model_len, hello.model.vocab_size, hello.model.dtype) == (256, 97, "float32")
        capacity = hello.capacity
        assert (capacity.num_blocks, capacity.block_size) == (32, 4)
        assert capacity.block_nbytes == 3 * 2 * 2 * 4 * 8 * 4
        assert [group.kind for group in capacity.groups] == ["full_attention"]
        assert generate(scheduler, 1, 1, [7, 3, 9, 2]) == expected
        assert '"ready": true' in worker.get("/readyz")
        assert "reprise_worker_steps_total 6.0" in worker.get("/metrics")
        assert worker.terminate() == 0


def test_plans_may_come_before_results(
    folder: Path, tmp_path: Path, scheduler: SchedulerPeer, expected: list[int]
) -> None:
    """The tokens of step n feed step n + 1, whose plan was sent without knowing them."""
    with WorkerProcess(folder, tmp_path, scheduler_endpoint=scheduler.endpoint, **SETTINGS):
        scheduler.welcome()
        prompt = ScheduledRequest(1, 0, len(PROMPT), (), True)
        scheduler.plan(StepPlan(1, added=(added(1, [7, 3, 9]),), scheduled=(prompt,)))
        scheduler.plan(StepPlan(2, scheduled=(ScheduledRequest(1, len(PROMPT), 1, (), True),)))
        tokens: list[int] = []
        for step_id in (3, 4, 5, 6, 7):
            tokens += unpack_ids(scheduler.wait_for(Kind.RESULT)[1].token_ids)
            if step_id < 7:
                new_blocks = (pack_ids([2]),) if step_id == 5 else ()
                entry = ScheduledRequest(1, len(PROMPT) + step_id - 2, 1, new_blocks, True)
                scheduler.plan(StepPlan(step_id, scheduled=(entry,)))
        tokens += unpack_ids(scheduler.wait_for(Kind.RESULT)[1].token_ids)
        assert tokens == expected


def test_blocks_go_to_the_store_and_come_back(
    folder: Path, tmp_path: Path, scheduler: SchedulerPeer, store: StorePeer, expected: list[int]
) -> None:
    settings = {**SETTINGS, "store_endpoint": store.endpoint, "scheduler_endpoint": scheduler.endpoint}
    with WorkerProcess(folder, tmp_path, **settings) as worker:
        hello = scheduler.welcome()
        assert generate(scheduler, 1, 1, [7, 3, 9, 2]) == expected
        saves = tuple(
            BlockSave(GroupId(0), block, block_hash, 4)
            for block, block_hash in zip([7, 3], HASHES, strict=True)
        )
        # Saved in the same plan that gives the blocks to another request.
        other = AddedRequest(2, pack_ids([9] * 8), 8, 0, (pack_ids([7, 3]),), GREEDY)
        step = ScheduledRequest(2, 0, 8, (), True)
        scheduler.run(StepPlan(7, removed=(1,), saves=saves, added=(other,), scheduled=(step,)))
        header = store.serve_one()
        assert (header.kind, header.generation) == (TransferKind.SAVE, 4)
        assert header.keyspace is not None
        assert (header.keyspace.namespace, header.keyspace.fingerprint) == (
            "reprise",
            hello.model.fingerprint,
        )

        scheduler.run(StepPlan(8, loads=(BlockLoad(3, 0, pack_ids([11, 12]), HASHES, 4),)))
        assert store.serve_one().kind == TransferKind.LOAD
        assert scheduler.wait_for_loads() == (LoadReport(3, 0),)
        assert generate(scheduler, 9, 3, [11, 12, 13, 14], computed=8) == expected
        assert "reprise_worker_loads_total 2.0" in worker.get("/metrics")


def test_a_load_runs_beside_steps_and_times_out(
    folder: Path, tmp_path: Path, scheduler: SchedulerPeer, store: StorePeer, expected: list[int]
) -> None:
    settings = {**SETTINGS, "store_endpoint": store.endpoint, "scheduler_endpoint": scheduler.endpoint}
    with WorkerProcess(folder, tmp_path, **settings, load_timeout_s=1.0):
        scheduler.welcome()
        scheduler.run(StepPlan(1, loads=(BlockLoad(3, 0, pack_ids([11, 12]), HASHES, 4),)))
        store.receive()  # and no answer
        assert generate(scheduler, 2, 1, [7, 3, 9, 2]) == expected
        report = LoadReport(3, 0, pack_ids([11, 12]), "timeout")
        assert scheduler.wait_for_loads() == (report,)


def test_a_stale_session_is_replaced(
    folder: Path, tmp_path: Path, scheduler: SchedulerPeer, expected: list[int]
) -> None:
    with WorkerProcess(folder, tmp_path, scheduler_endpoint=scheduler.endpoint, **SETTINGS):
        scheduler.welcome()
        assert generate(scheduler, 1, 1, [7, 3, 9, 2], count=3) == expected[:3]
        scheduler.say(Kind.STALE, Stale())
        scheduler.welcome()
        assert generate(scheduler, 1, 1, [4, 5, 6, 8]) == expected  # same handle, steps from 1


def test_a_refused_worker_ends_with_both_versions(
    folder: Path, tmp_path: Path, scheduler: SchedulerPeer
) -> None:
    with WorkerProcess(folder, tmp_path, scheduler_endpoint=scheduler.endpoint, **SETTINGS) as worker:
        scheduler.wait_for(Kind.HELLO, timeout_s=60)
        scheduler.say(Kind.REFUSED, Refused(scheduler_version=9, worker_version=1, reason="version"))
        assert worker.process.wait(10) == 1
        versions = f"scheduler speaks protocol version 9, this worker {PROTOCOL_VERSION}"
        assert versions in worker.log.read_text()


def test_a_model_that_cannot_be_served_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    with WorkerProcess(tmp_path / "nothing", tmp_path, **SETTINGS) as worker:
        assert worker.process.wait(60) == 1
        last = worker.log.read_text().splitlines()[-1]
        assert last == f"worker: model folder {tmp_path / 'nothing'} does not exist"
        assert "Traceback" not in worker.log.read_text()


def test_a_worker_without_a_scheduler_ends_on_sigterm(folder: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "scheduler_endpoint": "tcp://127.0.0.1:9"}
    with WorkerProcess(folder, tmp_path, **settings) as worker:
        while "waiting for the scheduler" not in worker.log.read_text():
            assert worker.process.poll() is None
            time.sleep(0.05)
        assert worker.terminate() == 0
