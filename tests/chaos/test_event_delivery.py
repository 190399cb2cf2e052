"""KV events under faults: whoever says exact has the truth, and in the end everybody has.

A cache manager under random load, with a model of a host tier, feeds a publisher process. Subscribers
follow: a steady one, one that is stopped by a signal and continued, one that joins late, one behind a
network that stalls, swallows and resets, and one that knows only replays. Publisher and scheduler are
killed and started again. REPRISE_EVENT_BLOCKS sets the length, in block events.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from reprise_wire.event_source_values import SourceOptions, SourceState
from support.cache_workload import CacheWorkload
from support.event_feeder import EventFeeder
from support.event_followers import Follower, FollowerProcess, digest
from support.service_process import ServiceProcess
from support.tcp_proxy import TcpProxy
from support.valkey_server import free_port

NUM_BLOCKS = int(os.environ.get("REPRISE_EVENT_BLOCKS", "30000"))
ROUNDS = max(8, NUM_BLOCKS // 250_000)
SETTLE_S = 60.0
LAG_S = 10.0
FULL_SPEED_BLOCKS = 100_000
"""Runs of fewer blocks are stretched, so that faults fall between batches."""


class System:
    """The publisher process, the feeder in this one, and the followers."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.rng = rng
        self.folder = folder
        self.intake, self.events, self.replay, self.metrics, self.grpc = (free_port() for _ in range(5))
        self.publisher = self.start_publisher()
        self.feeder = self.make_feeder()
        self.num_fed = 0

    def start_publisher(self) -> ServiceProcess:
        config = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://127.0.0.1:{self.events}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay}",
            "topic": "kv@e@m",
            "buffer_steps": 300,
            # So little that a stopped subscriber loses batches.
            "hwm": 200,
        }
        return ServiceProcess(
            "publisher",
            self.folder,
            metrics_port=self.metrics,
            listen_address=f"127.0.0.1:{self.grpc}",
            intake_endpoint=f"tcp://127.0.0.1:{self.intake}",
            events_config=json.dumps(config),
            bind="bind",
            heartbeat_s=0.3,
        )

    def make_feeder(self) -> EventFeeder:
        workload = CacheWorkload(random.Random(self.rng.random()), num_blocks=1500, host_blocks=3000)
        return EventFeeder(f"tcp://127.0.0.1:{self.intake}", workload, queue_batches=1000)

    async def feed(self, num_blocks: int) -> None:
        end = self.feeder.num_blocks + num_blocks
        self.num_fed += num_blocks
        while self.feeder.num_blocks < end:
            self.feeder.step(num_requests=12)
            if self.rng.random() < 0.001:
                self.feeder.reset()
            await asyncio.sleep(0.002 if NUM_BLOCKS < FULL_SPEED_BLOCKS else 0)

    async def restart_publisher(self) -> None:
        self.publisher.kill()
        await asyncio.sleep(self.rng.uniform(0, 0.5))
        self.publisher = self.start_publisher()
        await asyncio.to_thread(self.publisher.wait_until_ready)

    def restart_feeder(self) -> None:
        """Another scheduler, with an empty cache; what the one before had not sent is lost."""
        self.feeder.sender._socket.linger = 0
        self.feeder.close()
        self.feeder = self.make_feeder()

    @property
    def truth_digest(self) -> str:
        return digest(self.feeder.workload.truth())

    def close(self) -> None:
        self.feeder.close()
        self.publisher.kill()


@asynccontextmanager
async def running_system(rng: random.Random, folder: Path) -> AsyncIterator[System]:
    system = System(rng, folder)
    try:
        await asyncio.to_thread(system.publisher.wait_until_ready)
        yield system
    finally:
        system.close()


@pytest.mark.timeout(300 + NUM_BLOCKS // 1000)
async def test_every_index_is_the_truth_or_says_that_it_is_not(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    began_s = time.monotonic()
    async with AsyncExitStack() as stack:
        system = await stack.enter_async_context(running_system(rng, tmp_path))
        proxies = [await stack.enter_async_context(TcpProxy(port)) for port in (system.events, system.replay)]

        def follow(options: SourceOptions | None = None, *, events: int = 0, replay: int = 0) -> Follower:
            ports = events or system.events, replay or system.replay
            follower = Follower(*ports, options) if options else Follower(*ports)
            follower.go()
            stack.push_async_callback(follower.close)
            return follower

        steady = follow()
        replayer = follow(SourceOptions(snapshots=False, answer_s=2, backoff_s=0.05, max_backoff_s=0.5))
        proxied = follow(events=proxies[0].port, replay=proxies[1].port)
        stopped = FollowerProcess(system.events, system.replay, tmp_path)
        stack.callback(stopped.close)
        followers = {"steady": steady, "replayer": replayer, "proxied": proxied}
        for number in range(ROUNDS):
            faults = [asyncio.create_task(fault) for fault in choose_faults(system, proxies, number)]
            if number == ROUNDS // 3:
                stopped.freeze()
            if number == ROUNDS // 2:
                followers["late"] = follow()
            await system.feed(NUM_BLOCKS // ROUNDS)
            await asyncio.gather(*faults)
            if number == 2 * ROUNDS // 3:
                stopped.thaw()
            await check_claims(system, followers)
        await settle(system, followers, stopped)
        print(f"{system.num_fed} block events in {time.monotonic() - began_s:.1f} s")
        for name, follower in followers.items():
            print(name, follower.source.state.value, follower.report().counters)
        print("stopped", await stopped.report())
        seen = steady.source.counters
        assert seen.connections_lost
        assert seen.restarts
        assert proxied.source.counters.connections_lost
        assert sum(proxy.num_resets for proxy in proxies)
        assert (await stopped.report()).counters["snapshots"] > 1


def choose_faults(system: System, proxies: list[TcpProxy], number: int) -> list[Coroutine[Any, Any, None]]:
    """Of this round: the publisher in some, the scheduler in others, the network in most."""
    rng = system.rng
    faults: list[Coroutine[Any, Any, None]] = []
    if number in (1, ROUNDS - 2) or rng.random() < 0.15:
        faults.append(system.restart_publisher())
    elif number == ROUNDS // 2 + 1 or rng.random() < 0.15:
        faults.append(later(rng.uniform(0, 0.5), system.restart_feeder))
    proxy = rng.choice(proxies)
    match rng.randrange(4) if number else 1:
        case 0:
            faults.append(proxy.stall(rng.uniform(0.2, 1.5)))
        case 1:
            faults.append(proxy.swallow(rng.uniform(0.1, 1.0)))
        case 2:
            faults.append(later(rng.uniform(0, 0.5), proxies[0].reset))
    return faults


async def later(seconds: float, action: Callable[[], None]) -> None:
    await asyncio.sleep(seconds)
    action()


async def check_claims(system: System, followers: dict[str, Follower]) -> None:
    """The feeding pauses. The steady one gets to the truth, and whoever says exact has it or will at once."""
    steady = followers["steady"]
    truth = system.feeder.workload.truth()
    async with asyncio.timeout(SETTLE_S):
        while not (steady.source.state is SourceState.EXACT and steady.copies() == truth):
            await asyncio.sleep(0.05)
    for name, follower in followers.items():
        # A stalled connection shows what was true when it stalled, until the stall is over.
        end_s = time.monotonic() + LAG_S
        while follower.source.state is SourceState.EXACT and follower.copies() != truth:
            assert time.monotonic() < end_s, f"{name} says exact and is not: {follower.notices}"
            await asyncio.sleep(0.05)


async def settle(system: System, followers: dict[str, Follower], stopped: FollowerProcess) -> None:
    """The faults are over: all but the one without snapshots must become exact, with the truth."""
    truth = system.feeder.workload.truth()
    for name, follower in followers.items():
        if name == "replayer":
            continue
        try:
            async with asyncio.timeout(SETTLE_S):
                while not (follower.source.state is SourceState.EXACT and follower.copies() == truth):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{name}: {follower.report()}, {follower.notices}") from None
    replayer = followers["replayer"]
    assert replayer.source.state is SourceState.PARTIAL or replayer.copies() == truth
    async with asyncio.timeout(SETTLE_S):
        while not ((report := await stopped.report()).is_exact and report.digest == system.truth_digest):
            await asyncio.sleep(0.1)
