"""A scheduler with a real store and a real Valkey behind it; the worker is simulated."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from reprise.v1 import engine_pb2 as pb
from reprise_core.errors import ErrorKind
from reprise_core.hash_algorithms import external_hash
from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, KvEvent
from reprise_store.tier_changes import MAX_WATCHERS
from reprise_wire.block_transfer import Keyspace
from reprise_wire.error_codec import PeerError
from support.external_world import stored_hashes
from support.scheduler_harness import GatewaySide, SchedulerHarness, running_scheduler
from support.sim_worker import expected_output
from support.store_harness import RunningStore, running_store
from support.store_worker import KEYSPACE, StoreOfSim
from support.valkey_server import ValkeyProcess, free_port
from support.waiting import until
from support.zmq_worker import ZmqWorker

BLOCK = 4
PROMPT = [4 + i * i % 40 for i in range(41)]
NUM_BLOCKS = 10


@dataclass
class Engine:
    scheduler: SchedulerHarness
    gateway: GatewaySide
    events: list[KvEvent] = field(default_factory=list)
    _num_asked: int = 0

    async def ask(self, prompt: list[int] = PROMPT, **more: object) -> pb.PromptUsage:
        self._num_asked += 1
        name = f"r{self._num_asked}"
        self.gateway.submit(name, prompt, max_tokens=2, **more)
        await self.gateway.ended(name)
        assert self.gateway.requests[name].token_ids == expected_output(prompt, 2)
        usage = self.gateway.requests[name].usage
        assert usage is not None
        return usage

    async def reset(self, *, external: bool = False) -> pb.ResetPrefixCacheResponse:
        return await self.scheduler.stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(reset_external=external))

    def held(self, medium: str) -> set[object]:
        """Hashes that somebody believes to be there who follows the events from the beginning."""
        counts: dict[object, int] = {}
        for event in self.events:
            if isinstance(event, AllBlocksCleared):
                counts.clear()
            elif event.medium == medium:
                for block in event.block_hashes:
                    counts[block] = counts.get(block, 0) + (-1 if isinstance(event, BlockRemoved) else 1)
        assert all(count >= 0 for count in counts.values())
        return {block for block, count in counts.items() if count}

    async def until_held(self, medium: str, num_blocks: int) -> None:
        await until(lambda: len(self.held(medium)) == num_blocks)


@asynccontextmanager
async def engine(store: RunningStore, **settings: object) -> AsyncIterator[Engine]:
    values = {
        "store_address": store.app._settings.listen_address,
        "publisher_endpoint": f"tcp://127.0.0.1:{free_port()}",
        **settings,
    }
    async with running_scheduler(**values) as scheduler:
        events: list[KvEvent] = []
        sender = scheduler.app._events
        send = sender.send
        sender.send = lambda batch: (events.extend(batch), send(batch))
        behind = StoreOfSim(lambda: store.app.store)
        worker = ZmqWorker(scheduler.settings.workers_endpoint, num_blocks=200, store=behind).start()
        try:
            await scheduler.wait_for_worker()
            connector = scheduler.app._loop.scheduler.connector
            await until(lambda: connector.generation is not None)
            gateway = await GatewaySide(scheduler).attach()
            yield Engine(scheduler, gateway, events)
            assert worker.failure is None
            await gateway.cut()
        finally:
            await asyncio.to_thread(worker.stop)  # it may wait for the store, which lives on this loop


@pytest.fixture
def valkey(tmp_path: Path):
    server = ValkeyProcess(tmp_path).start()
    yield server
    server.kill()


def block_keys(valkey: ValkeyProcess) -> set[bytes]:
    """Hashes of the blocks in Redis."""
    return set[bytes]().union(*stored_hashes(valkey).values())


async def test_a2_salts_share_nothing_in_the_external_tier(valkey: ValkeyProcess) -> None:
    async with running_store(redis_url=valkey.url) as store, engine(store) as one:
        await one.ask(salt="t1")
        await until(lambda: len(block_keys(valkey)) == NUM_BLOCKS)
        of_t1 = block_keys(valkey)
        assert (await one.reset()).device
        usage = await one.ask(salt="t2")
        assert (usage.device_tokens, usage.host_tokens, usage.external_tokens) == (0, 0, 0)
        await until(lambda: len(block_keys(valkey)) == 2 * NUM_BLOCKS)
        assert of_t1 < block_keys(valkey)
        assert of_t1 == set(one.scheduler.app._loop.profile.split(one.scheduler.hashes(PROMPT, "t1").digests))
        await one.reset()
        assert (await one.ask(salt="t1")).host_tokens == NUM_BLOCKS * BLOCK
        metric = one.scheduler.metric
        assert await metric("vllm:external_prefix_cache_hits_total") == NUM_BLOCKS * BLOCK
        assert await metric("vllm:external_prefix_cache_queries_total") == 3 * len(PROMPT)


async def test_every_tier_is_in_the_events_with_tokens_and_told_again_after_a_reset_of_the_device(
    valkey: ValkeyProcess,
) -> None:
    async with running_store(redis_url=valkey.url) as store, engine(store) as one:
        await one.ask()
        await one.until_held("CPU", NUM_BLOCKS)
        await one.until_held("EXTERNAL", NUM_BLOCKS)
        assert one.held("CPU") == one.held("EXTERNAL") == one.held("GPU")
        for event in one.events:
            assert len(event.token_ids) == BLOCK * len(event.block_hashes), "a store without its tokens"
            assert event.group_idx == 0
        await one.reset()
        assert AllBlocksCleared() in one.events
        await one.until_held("CPU", NUM_BLOCKS)
        await one.until_held("EXTERNAL", NUM_BLOCKS)
        assert one.held("GPU") == set()
        # Loaded from the host: on the device again, and nowhere else anew.
        before = len(one.events)
        assert (await one.ask()).host_tokens == NUM_BLOCKS * BLOCK
        assert len(one.held("GPU")) == NUM_BLOCKS
        assert {event.medium for event in one.events[before:]} == {"GPU"}
        await one.reset(external=True)
        await one.until_held("CPU", 0)
        await one.until_held("EXTERNAL", 0)


async def test_blocks_that_make_room_in_the_host_tier_leave_it_in_the_events_alone(
    valkey: ValkeyProcess,
) -> None:
    room = 12 * BLOCK * 8
    async with running_store(redis_url=valkey.url, capacity_bytes=room) as store, engine(store) as one:
        await one.ask()
        await one.ask([7, *PROMPT])
        await one.until_held("EXTERNAL", 2 * NUM_BLOCKS)
        await until(lambda: store.app.store.stats().host_blocks == 12)
        await one.until_held("CPU", 12)
        assert len(one.held("GPU")) == 2 * NUM_BLOCKS


async def test_an_engine_that_shares_a_store_announces_only_what_it_knows(valkey: ValkeyProcess) -> None:
    async with running_store(redis_url=valkey.url) as store, engine(store) as one, engine(store) as other:
        await one.ask()
        await one.until_held("CPU", NUM_BLOCKS)
        counters = other.scheduler.app._loop._tiers._events.counters
        await until(lambda: counters.unknown >= NUM_BLOCKS)
        assert other.events == []
        assert (await other.ask()).host_tokens == NUM_BLOCKS * BLOCK
        await other.until_held("CPU", NUM_BLOCKS)
        assert other.held("CPU") == one.held("CPU")


async def test_while_the_store_does_not_tell_nothing_is_in_its_tiers_and_then_all_of_it_is_again(
    valkey: ValkeyProcess,
) -> None:
    async with running_store(redis_url=valkey.url) as store, engine(store) as one:
        await one.ask()
        await one.until_held("CPU", NUM_BLOCKS)
        store.app._changes.close()
        await one.until_held("CPU", 0)
        await one.until_held("EXTERNAL", 0)
        assert len(one.held("GPU")) == NUM_BLOCKS
        await one.until_held("CPU", NUM_BLOCKS)
        await one.until_held("EXTERNAL", NUM_BLOCKS)
        assert await one.scheduler.metric("reprise_scheduler_tier_watch_breaks_total") == 1
        assert await one.scheduler.metric("reprise_scheduler_tier_watching") == 1


async def test_a_store_that_is_away_takes_its_tiers_blocks_with_it_and_stops_nobody(
    valkey: ValkeyProcess,
) -> None:
    async with running_store(redis_url=valkey.url) as store, engine(store) as one:
        await one.ask()
        await one.until_held("CPU", NUM_BLOCKS)
        await store.app._grpc.stop(0)
        await one.until_held("CPU", 0)
        assert len(one.held("GPU")) == NUM_BLOCKS
        assert await one.scheduler.metric("reprise_scheduler_tier_watching") == 0
        assert (await one.ask()).device_tokens == NUM_BLOCKS * BLOCK


async def test_j1_the_default_reset_says_what_it_left_and_the_other_leaves_nothing(
    valkey: ValkeyProcess,
) -> None:
    async with running_store(redis_url=valkey.url) as store, engine(store) as one:
        await one.ask()
        await until(lambda: len(block_keys(valkey)) == NUM_BLOCKS)
        answer = await one.reset()
        assert answer.device
        assert not answer.HasField("external"), "it was not asked for, and not cleared"
        assert (await one.ask()).host_tokens == NUM_BLOCKS * BLOCK
        answer = await one.reset(external=True)
        assert answer.device
        assert answer.external
        usage = await one.ask()
        assert (usage.device_tokens, usage.host_tokens, usage.external_tokens) == (0, 0, 0)


async def test_j2_a_tier_that_refuses_a_reset_does_not_keep_the_device_from_it(
    valkey: ValkeyProcess,
) -> None:
    async with running_store(redis_url=valkey.url) as store, engine(store) as one:
        await one.ask()
        await until(lambda: len(block_keys(valkey)) == NUM_BLOCKS)
        valkey.kill()
        await store.until_redis_is(False)
        answer = await one.reset(external=True)
        assert answer.device
        assert answer.external is False
        assert one.held("GPU") == set()


async def test_c5_what_the_events_promise_of_a_tier_is_what_is_served_from_it(valkey: ValkeyProcess) -> None:
    """A block is loaded by itself: three that are shared are promised, and served, as three."""
    async with running_store(redis_url=valkey.url) as store, engine(store) as one:
        await one.ask()
        await one.until_held("CPU", NUM_BLOCKS)
        await one.reset()
        await one.until_held("CPU", NUM_BLOCKS)
        other = [*PROMPT[: 3 * BLOCK + 1], 49, 48, 47, *PROMPT]
        digests = one.scheduler.app._loop.profile.split(one.scheduler.hashes(other).digests)
        promised = 0
        while external_hash(digests[promised]) in one.held("CPU"):
            promised += 1
        assert promised == 3
        assert (await one.ask(other)).host_tokens == promised * BLOCK
        assert (
            await one.scheduler.metric("vllm:prompt_tokens_cached_by_source_total", source="host")
            == promised * BLOCK
        )


async def test_a_watcher_that_names_no_keyspace_or_comes_too_late_is_refused(valkey: ValkeyProcess) -> None:
    async with running_store(redis_url=valkey.url) as store:
        with pytest.raises(PeerError, match=r"keyspace\.namespace") as caught:
            await anext(store.client.watch_tiers(Keyspace("a:b", "0" * 32)))
        assert caught.value.kind is ErrorKind.INVALID
        watches = [store.client.watch_tiers(KEYSPACE) for _ in range(MAX_WATCHERS)]
        for watch in watches:
            assert (await anext(watch)).start
        assert store.metric("tier_watchers") == MAX_WATCHERS
        with pytest.raises(PeerError, match="64 watchers") as caught:
            await anext(store.client.watch_tiers(KEYSPACE))
        assert caught.value.kind is ErrorKind.EXHAUSTED
        for watch in watches:
            await watch.aclose()
        await until(lambda: store.metric("tier_watchers") == 0)


async def test_events_of_tiers_can_be_switched_off(valkey: ValkeyProcess) -> None:
    async with running_store(redis_url=valkey.url) as store, engine(store, tier_events=False) as one:
        await one.ask()
        await until(lambda: len(block_keys(valkey)) == NUM_BLOCKS)
        assert store.app._changes.num_watchers == 0
        assert {event.medium for event in one.events} == {"GPU"}
