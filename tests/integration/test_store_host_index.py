"""Workers that find the host tier's blocks by themselves: what they find, and what the store still knows."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from reprise_core.steps import LoadReport, pack_ids
from reprise_wire.block_transfer import redis_keys
from support.store_harness import KEYSPACE, RunningStore, block_hashes, keys_of, running_store
from support.valkey_server import ValkeyProcess
from support.waiting import until
from support.worker_link import LinkedWorker, linked_worker

VALUE_NBYTES = 64 + 8192
"""A block of the worker, with its header."""


@asynccontextmanager
async def sharing(**settings: object) -> AsyncIterator[tuple[RunningStore, LinkedWorker, int]]:
    """A store, a worker that shares its memory, and the generation."""
    async with running_store(**settings) as store:
        generation = (await store.client.lookup(KEYSPACE, [0], [])).generation
        with linked_worker(store.app.blocks_endpoint, KEYSPACE) as worker:
            await until(lambda: worker.metric("store_memory_shared") == 1)
            yield store, worker, generation


async def save(worker: LinkedWorker, numbers: range, generation: int) -> None:
    before = worker.metric("saves_total")
    worker.save(numbers, block_hashes(numbers.stop)[numbers.start :], generation)
    await until(lambda: worker.metric("saves_total") == before + len(numbers))


async def load(worker: LinkedWorker, numbers: range, generation: int) -> LoadReport:
    """Into the blocks that are 30 further."""
    hashes = block_hashes(numbers.stop)[numbers.start :]
    blocks = range(30 + numbers.start, 30 + numbers.stop)
    return await asyncio.to_thread(worker.load, blocks, hashes, generation)


async def refuse(*arguments: object) -> None:
    raise AssertionError("the store was asked")


async def test_nobody_is_asked_for_what_host_memory_has() -> None:
    async with sharing() as (store, worker, generation):
        await save(worker, range(30), generation)
        store.app.store.load = refuse  # type: ignore[method-assign, assignment]
        assert await load(worker, range(30), generation) == LoadReport(1, 0)
        assert all(torch.equal(worker.content(30 + i), worker.content(i)) for i in range(30))
        assert worker.metric("loads_by_index_total") == worker.metric("loads_total") == 30
        # It is told, though.
        await until(lambda: store.metric("loads_total", tier="host", outcome="hit") == 30)
        assert store.metric("load_bytes_total", tier="host") == 30 * VALUE_NBYTES
        assert store.app.store.stats().loads == 30


async def test_what_is_read_is_the_last_to_go() -> None:
    async with sharing(capacity_bytes=4 * VALUE_NBYTES) as (store, worker, generation):
        await save(worker, range(4), generation)
        await load(worker, range(1), generation)
        await until(lambda: store.metric("loads_total", tier="host", outcome="hit") == 1)
        await save(worker, range(4, 7), generation)
        assert await load(worker, range(1), generation) == LoadReport(1, 0)
        assert (await load(worker, range(1, 4), generation)).failed_block_ids == pack_ids(range(31, 34))
        assert worker.metric("loads_by_index_total") == 2


async def test_what_was_evicted_or_reset_is_not_there() -> None:
    async with sharing() as (store, worker, generation):
        await save(worker, range(3), generation)
        await store.client.evict(KEYSPACE, block_hashes(1))
        report = await load(worker, range(3), generation)
        assert (report.failed_block_ids, report.reason) == (pack_ids([30]), "missing")
        now = await store.client.reset(KEYSPACE)
        report = await load(worker, range(1, 3), generation)
        assert (report.failed_block_ids, report.reason) == (pack_ids([31, 32]), "refused")
        report = await load(worker, range(1, 3), now)
        assert (report.failed_block_ids, report.reason) == (pack_ids([31, 32]), "missing")
        assert worker.metric("loads_by_index_total") == 2


async def test_blocks_of_other_tiers_are_asked_for_and_then_at_hand(tmp_path: Path) -> None:
    redis = ValkeyProcess(tmp_path).start()
    try:
        async with sharing(redis_url=redis.url) as (store, worker, generation):
            await save(worker, range(6), generation)
            await store.settled()
            for name in redis_keys(KEYSPACE, generation, keys_of(block_hashes(3))):
                store.app.store._host.drop(name)
            assert await load(worker, range(6), generation) == LoadReport(1, 0)
            assert worker.metric("loads_by_index_total") == 3
            assert store.metric("loads_total", tier="external", outcome="hit") == 3
            await until(lambda: store.app.store._host.num_blocks == 6)
            store.app.store.load = refuse  # type: ignore[method-assign, assignment]
            assert await load(worker, range(6), generation) == LoadReport(1, 0)
            assert worker.metric("loads_by_index_total") == 9
    finally:
        redis.kill()


async def test_values_outside_the_shared_memory_are_asked_for() -> None:
    async with sharing() as (store, worker, generation):
        assert store.app._arena is not None
        store.app._arena._budget_bytes = 0
        await save(worker, range(2), generation)
        assert await load(worker, range(2), generation) == LoadReport(1, 0)
        assert worker.metric("loads_by_index_total") == 0


@pytest.mark.parametrize("capacity_bytes", [0, 1 << 20])
async def test_a_store_without_a_host_tier_has_no_index(capacity_bytes: int, tmp_path: Path) -> None:
    async with sharing(capacity_bytes=capacity_bytes, disk_folder=str(tmp_path)) as (_, worker, generation):
        assert (worker.transfers._wire.index is not None) == (capacity_bytes > 0)
        await save(worker, range(2), generation)
        assert await load(worker, range(2), generation) == LoadReport(1, 0)
        assert worker.metric("loads_by_index_total") == (2 if capacity_bytes else 0)
