"""Four writers of two engines put the same keys while others read them: every value is a written one."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
import torch

from reprise_core.steps import LoadReport, unpack_ids
from support.store_harness import KEYSPACE, block_hashes, running_store
from support.valkey_server import ValkeyProcess
from support.waiting import until
from support.worker_link import LinkedWorker, linked_worker

NUM_KEYS = 12
SECONDS = 1.5


@pytest.fixture
def redis(tmp_path: Path):
    server = ValkeyProcess(tmp_path).start()
    yield server
    server.kill()


def fill(worker: LinkedWorker, block: int, number: int) -> None:
    """Every element of the block says the same."""
    for view in (*worker.kv.keys, *worker.kv.values):
        view[block].fill_(number)


def write_again_and_again(worker: LinkedWorker, number: int, generation: int, stop: threading.Event) -> int:
    hashes, rounds = block_hashes(NUM_KEYS), 0
    while not stop.is_set():
        rounds += 1
        for block in range(NUM_KEYS):
            fill(worker, block, number * 1000 + rounds % 1000)
        worker.save(range(NUM_KEYS), hashes, generation)
        time.sleep(0.02)
    return rounds


def read_again_and_again(
    worker: LinkedWorker, generation: int, stop: threading.Event
) -> tuple[int, int, set[int]]:
    """Blocks read, blocks refused by their checksum, and whose values they were."""
    hashes, num_read, num_refused, seen = block_hashes(NUM_KEYS), 0, 0, set()
    targets = list(range(32, 32 + NUM_KEYS))
    while not stop.is_set():
        report = worker.load(targets, hashes, generation)
        failed = set(unpack_ids(report.failed_block_ids))
        assert report.reason in ("", "damaged")
        num_refused += len(failed)
        for block in set(targets) - failed:
            content = worker.content(block).view(torch.float32)
            values = set(content.tolist())
            assert len(values) == 1, "half of one value and half of another"
            seen.add(int(values.pop()) // 1000)
            num_read += 1
    return num_read, num_refused, seen


@pytest.mark.parametrize("way", ["shared memory", "messages, from Redis alone"])
async def test_no_reader_ever_sees_half_of_a_value(redis: ValkeyProcess, way: str) -> None:
    shared = way == "shared memory"
    settings: dict[str, object] = {"redis_url": redis.url, "redis_timeout_s": 5.0}
    if not shared:
        settings |= {"capacity_bytes": 0, "shared_memory": "off", "save_queue_blocks": 64}
    async with running_store(**settings) as one, running_store(**settings) as two:
        generation = (await one.client.lookup(KEYSPACE, [0], [])).generation
        assert (await two.client.lookup(KEYSPACE, [0], [])).generation == generation
        endpoints = [store.app.blocks_endpoint for store in (one, two)]

        def member(index: int) -> LinkedWorker:
            return LinkedWorker(endpoints[index % 2], KEYSPACE, shared_memory=shared)

        workers = [member(index) for index in range(6)]
        for worker in workers:
            worker.link.start()
        try:
            for worker in workers:
                await until(lambda worker=worker: worker.metric("store_memory_shared") == shared)  # type: ignore[misc]
            for block in range(NUM_KEYS):
                fill(workers[0], block, 0)
            workers[0].save(range(NUM_KEYS), block_hashes(NUM_KEYS), generation)
            await until(lambda: one.metric("saves_total", tier="external", outcome="written") == NUM_KEYS)
            stop = threading.Event()
            writing = [
                asyncio.to_thread(write_again_and_again, worker, number, generation, stop)
                for number, worker in enumerate(workers[:4])
            ]
            reading = [
                asyncio.to_thread(read_again_and_again, worker, generation, stop) for worker in workers[4:]
            ]
            asyncio.get_running_loop().call_later(SECONDS, stop.set)
            results = await asyncio.gather(*writing, *reading)
            num_read = sum(result[0] for result in results[4:])
            num_refused = sum(result[1] for result in results[4:])
            writers = set().union(*(result[2] for result in results[4:]))
            print(
                f"{way}: {sum(results[:4])} rounds of writes, {num_read} blocks read, {num_refused} refused"
            )
            assert num_read > 10 * NUM_KEYS
            # Checksums would catch a torn value; leases and whole replies see to it that there is none.
            assert num_refused == 0
            assert len(writers) > 1, "the readers saw values of several writers"
            num_by_index = sum(worker.metric("loads_by_index_total") for worker in workers[4:])
            assert (num_by_index > NUM_KEYS) is shared
            for store in (one, two):
                await store.settled()
                await until(lambda store=store: store.metric("memory_leases") == 0)  # type: ignore[misc]
        finally:
            for worker in workers:
                worker.link.stop()
    for worker in workers:
        assert not worker.errors


async def test_a_value_written_by_one_engine_is_read_whole_by_another(redis: ValkeyProcess) -> None:
    """The same content under the same key from two engines, as engines make it: any of them is right."""
    async with running_store(redis_url=redis.url) as one, running_store(redis_url=redis.url) as two:
        generation = (await one.client.lookup(KEYSPACE, [0], [])).generation
        hashes = block_hashes(4)
        with (
            linked_worker(one.app.blocks_endpoint, KEYSPACE) as a,
            linked_worker(two.app.blocks_endpoint, KEYSPACE) as b,
        ):
            for worker in (a, b):
                for block in range(4):
                    fill(worker, block, 7 + block)
                worker.save(range(4), hashes, generation)
            for store in (one, two):
                await until(
                    lambda store=store: store.metric("saves_total", tier="external", outcome="written") == 4
                )  # type: ignore[misc]
            for reader in (a, b):
                assert await asyncio.to_thread(reader.load, range(40, 44), hashes, generation) == LoadReport(
                    1, 0
                )
                assert all(torch.equal(reader.content(40 + i), reader.content(i)) for i in range(4))
