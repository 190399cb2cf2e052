"""Blocks between the device's cache and a store, beside steps that overwrite them."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from reprise_core.ids import BlockHash
from reprise_core.steps import BlockLoad, pack_ids
from reprise_wire.block_codec import HEADER_NBYTES
from reprise_wire.block_transfer import Keyspace
from reprise_worker.attention import LayerCall, TorchAttention
from reprise_worker.batch import Batch
from reprise_worker.kv_cache import KvCache
from reprise_worker.staging import Staging
from support.gpu import DEVICE, ON_CUDA, needs_device
from support.runner_driver import Driver, block_save
from support.tiny_models import paged, plain_greedy, small_config, small_model
from support.waiting import until_blocking
from support.worker_link import LinkedWorker, linked_worker, random_cache
from support.worker_peers import StorePeer

pytestmark = needs_device
KEYSPACE = Keyspace("test", "ab" * 16)


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def sleep_on_device(milliseconds: float) -> None:
    """Whatever is queued next on this thread's stream waits so long."""
    if ON_CUDA:
        torch.cuda._sleep(int(milliseconds * 2e6))


class Served(StorePeer):
    """A store whose thread answers everything."""

    def payload(self, number: int) -> bytes | None:
        block_hash = hash_of(number)
        found = [value for key, value in list(self.values.items()) if key.block_hash == block_hash]
        return found[0][HEADER_NBYTES:] if found else None


@contextmanager
def served() -> Iterator[Served]:
    store, over = Served(), threading.Event()

    def serve() -> None:
        while not over.is_set():
            if not store.socket.poll(20):
                continue
            with suppress(AssertionError):  # a greeting or a release, and nothing after it
                store.serve_one(timeout_s=0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield store
    finally:
        over.set()
        thread.join()
        store.close()


def content(kv: KvCache, block_id: int) -> bytes:
    out = torch.empty(kv.block_nbytes, dtype=torch.uint8)
    kv.export_block(block_id, out)
    return out.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_block_comes_back_bit_by_bit(dtype: torch.dtype) -> None:
    kv = random_cache(8, DEVICE, dtype)
    before = [content(kv, block_id) for block_id in range(8)]
    kv.import_block(5, memoryview(before[3]))
    after = [content(kv, block_id) for block_id in range(8)]
    assert after == [*before[:5], before[3], *before[6:]]
    for view in (*kv.keys, *kv.values):
        assert torch.equal(view[5], view[3])


def test_saves_are_copied_before_steps_overwrite() -> None:
    """A pool of 8 blocks, each overwritten as soon as its save returns, behind a device that is busy."""
    kv = random_cache(9, DEVICE)
    expected: dict[int, torch.Tensor] = {}
    chance = random.Random(3)
    with served() as store, linked_worker(store.endpoint, KEYSPACE, kv=kv) as worker:
        for number in range(300):
            block_id = chance.randrange(1, 9)
            if number % 10 == 0:
                sleep_on_device(5)
            for view in (*kv.keys, *kv.values):
                view[block_id].uniform_()
            copy = kv._slabs[block_id].clone()
            if not worker.transfers.save([block_save(block_id, hash_of(number))]):
                expected[number] = copy
            for view in (*kv.keys, *kv.values):
                view[block_id].fill_(-1)
        until_blocking(lambda: all(store.payload(number) is not None for number in expected))
        assert len(expected) >= 100
        for number, copy in expected.items():
            assert store.payload(number) == copy.cpu().numpy().tobytes(), number


class SlowAttention(TorchAttention):
    """Keeps the device busy in front of the first layer's writes."""

    milliseconds = 0.0

    def attend(
        self,
        call: LayerCall,
        batch: Batch,
        kv: KvCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        if call.layer == 0 and self.milliseconds:
            sleep_on_device(self.milliseconds)
        return super().attend(call, batch, kv, query, key, value)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=length)


@pytest.fixture
def driver() -> Driver:
    driver = Driver(paged(small_model(small_config("Llama")), DEVICE), num_blocks=64)
    driver.runner._backend = SlowAttention()
    return driver


@contextmanager
def moving(driver: Driver) -> Iterator[tuple[Served, LinkedWorker]]:
    with served() as store, linked_worker(store.endpoint, KEYSPACE, kv=driver.kv) as worker:
        driver.runner._mover = worker.transfers
        yield store, worker


def save_prompt(driver: Driver, store: Served, prompt: list[int]) -> None:
    """Computes a prompt of whole blocks and a token, and saves block n as hash n."""
    driver.add(1, prompt)
    driver.step({1: len(prompt)})
    blocks = driver.blocks[1][: len(prompt) // 4]
    driver.step({}, saves=tuple(block_save(block, hash_of(n)) for n, block in enumerate(blocks)))
    until_blocking(lambda: all(store.payload(n) is not None for n in range(len(blocks))))


@pytest.mark.parametrize("attempt", range(3))
def test_a_load_is_not_overtaken_by_an_earlier_step(driver: Driver, attempt: int) -> None:
    """Its blocks were those of a request that a slow step, which draws nothing, still writes."""
    prompt = prompt_of(17, 1)
    with moving(driver) as (store, worker):
        save_prompt(driver, store, prompt)
        driver.add(2, prompt_of(40, 2 + attempt))
        SlowAttention.milliseconds = 200.0
        driver.step({2: 32})
        SlowAttention.milliseconds = 0.0
        blocks = driver.blocks[2][:4]
        driver.remove(2, keep_blocks=True)
        load = BlockLoad(3, 0, pack_ids(blocks), tuple(map(hash_of, range(4))), 0)
        driver.step({}, loads=(load,))
        with worker._arrived:
            assert worker._arrived.wait_for(lambda: worker._reports, timeout=30)
        assert not worker._reports[0].reason
        # A step right after the report reads the loaded bytes.
        driver.add(3, prompt, shared_blocks=blocks)
        driver.finish([3], 8)
        assert driver.output(3) == plain_greedy(driver.model, prompt, 8)
        for number, block in enumerate(blocks):
            assert content(driver.kv, block) == store.payload(number)


def test_loads_run_beside_steps(driver: Driver) -> None:
    """Requests decode while blocks are loaded into others, again and again."""
    prompt = prompt_of(17, 1)
    with moving(driver) as (store, worker):
        save_prompt(driver, store, prompt)
        spare = [driver.free.pop() for _ in range(8)]
        prompts = {handle: prompt_of(5 + handle, handle) for handle in (10, 11, 12)}
        for handle, own in prompts.items():
            driver.add(handle, own)
        num_loads = 20
        for index in range(num_loads):
            targets = spare[4 * (index % 2) :][:4]
            hashes = tuple(map(hash_of, range(4)))
            load = BlockLoad(100 + index, 0, pack_ids(targets), hashes, 0)
            driver.step({handle: driver.remaining(handle) for handle in prompts}, loads=(load,))
            with worker._arrived:
                wanted = index  # the one before is over: its blocks come next
                assert worker._arrived.wait_for(lambda n=wanted: len(worker._reports) >= n, timeout=30)
        with worker._arrived:
            assert worker._arrived.wait_for(lambda: len(worker._reports) == num_loads, timeout=30)
        assert not any(report.reason for report in worker._reports)
        for index, block in enumerate(spare):
            assert content(driver.kv, block) == store.payload(index % 4)
        for handle, own in prompts.items():
            assert driver.output(handle) == plain_greedy(driver.model, own, num_loads)


def test_8_bit_values_are_those_of_a_cpu() -> None:
    kv = random_cache(8, DEVICE, torch.bfloat16)
    twin = random_cache(8, torch.device("cpu"), torch.bfloat16)
    twin.import_block(3, memoryview(content(kv, 3)))
    values = []
    for cache in (kv, twin):
        with served() as store, linked_worker(store.endpoint, KEYSPACE, kv=cache, fp8=True) as worker:
            worker.save([3], [hash_of(1)], 0)
            until_blocking(lambda: store.payload(1) is not None)
            values.append(store.payload(1))
            assert not worker.load([5], [hash_of(1)], 0).reason
    assert values[0] == values[1]
    for ours, theirs in zip((*kv.keys, *kv.values), (*twin.keys, *twin.values), strict=True):
        assert torch.equal(ours[5].cpu(), theirs[5])
        assert torch.allclose(ours[5].float(), ours[3].float(), rtol=1 / 15, atol=1e-3)


@pytest.mark.skipif(not ON_CUDA, reason="pinned memory is CUDA's")
def test_host_memory_is_pinned_and_bounded() -> None:
    staging = Staging(1_000_000, staging_bytes=64 << 20, pinned=True, shared=True)
    rows = staging._tensor
    assert rows.is_pinned()
    assert rows.nbytes <= 64 << 20
    taken = [staging.take() for _ in range(staging.num_rows + 2)]
    assert taken[-2:] == [None, None]
    kv = random_cache(8, DEVICE)
    assert kv._load_row.is_pinned()
    assert kv._load_row.nbytes == kv.block_nbytes
