"""KV events under faults: whoever says exact has the truth, and in the end everybody has.

A scheduler's event side (a cache manager under random load, with a model of a host tier) and a publisher
are processes, killed while they send and started again. Subscribers follow: a steady one, one that is
stopped by a signal and continued, one that joins late, one behind a network that stalls, swallows and
resets, and one that knows only replays. REPRISE_EVENT_BLOCKS sets the length, in block events.
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
from support.cache_workload import Truth
from support.event_followers import Follower, FollowerProcess, digest
from support.feeder_process import Fed, FeederLost, FeederProcess
from support.kept_ports import KeptPort
from support.service_process import ServiceProcess
from support.tcp_proxy import TcpProxy

NUM_BLOCKS = int(os.environ.get("REPRISE_EVENT_BLOCKS", "30000"))
ROUNDS = max(8, NUM_BLOCKS // 100_000)
SLICE_BLOCKS = min(2000, NUM_BLOCKS // ROUNDS // 8)
"""Fed in one go; faults begin between two of them."""
SETTLE_S = 60.0
LAG_S = 10.0
PACE_S = 1.0
"""The longest that feeding waits for the steady one."""
KILL_S = 0.02
"""Within so long a slice is being sent."""
FULL_SPEED_BLOCKS = 100_000
"""Runs of fewer blocks are stretched, so that faults fall between batches."""
FAULT_CHANCE = 0.25
"""For each of the two processes to be killed in a round."""

Fault = Callable[[], Coroutine[Any, Any, None]]


class System:
    """The processes: publisher and feeder."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.rng = rng
        self.folder = folder
        self.ports = [KeptPort() for _ in range(5)]
        self.intake, self.events, self.replay, self.metrics, self.grpc = (port.number for port in self.ports)
        self.publisher = self.start_publisher()
        self.feeder = self.make_feeder()
        self.num_fed = 0
        self.num_publishers_killed = 0
        self.num_feeders_killed = 0
        self.num_lost_sending = 0
        """Of the feeders killed, those that were told to send or were at it."""

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

    def make_feeder(self) -> FeederProcess:
        return FeederProcess(
            f"tcp://127.0.0.1:{self.intake}",
            self.folder,
            seed=self.rng.randrange(2**32),
            pause_s=0.002 if NUM_BLOCKS < FULL_SPEED_BLOCKS else 0,
        )

    async def feed(self, num_blocks: int, faults: dict[int, Fault], steady: Follower) -> None:
        """`faults` by the number of blocks after which they begin; returns when they are over."""
        due = sorted(faults.items())
        fed = 0
        async with asyncio.TaskGroup() as running:
            while fed < num_blocks:
                while due and due[0][0] <= fed:
                    running.create_task(due.pop(0)[1]())
                try:
                    done = await self.feeder.feed(SLICE_BLOCKS)
                except FeederLost:
                    self.num_lost_sending += 1
                    await self.start_feeder_anew()
                    continue
                fed += done.num_blocks
                await self.pace(done, steady)
        self.num_fed += fed
        if self.feeder.was_killed:
            await self.start_feeder_anew()

    async def pace(self, done: Fed, steady: Follower) -> None:
        """A follower that lags for good would be told snapshots only."""
        end_s = time.monotonic() + PACE_S
        while steady.source.is_following and steady.last_ts < done.sent_ts and time.monotonic() < end_s:
            await asyncio.sleep(0.001)

    async def restart_publisher(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, KILL_S))
        self.publisher.kill()
        self.num_publishers_killed += 1
        await asyncio.sleep(self.rng.uniform(0, 0.5))
        self.publisher = self.start_publisher()
        await asyncio.to_thread(self.publisher.wait_until_ready)

    async def kill_feeder(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, KILL_S))
        await self.feeder.kill()
        self.num_feeders_killed += 1

    async def start_feeder_anew(self) -> None:
        """Another scheduler, with an empty cache; what the one before had not sent is lost."""
        self.feeder = self.make_feeder()
        await self.feeder.start()

    async def close(self) -> None:
        await self.feeder.kill()
        self.publisher.kill()
        for port in self.ports:
            port.close()


@asynccontextmanager
async def running_system(rng: random.Random, folder: Path) -> AsyncIterator[System]:
    system = System(rng, folder)
    try:
        await asyncio.to_thread(system.publisher.wait_until_ready)
        await system.feeder.start()
        yield system
    finally:
        await system.close()


@pytest.mark.timeout(300 + NUM_BLOCKS // 2000)
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
            if number == ROUNDS // 3:
                stopped.freeze()
            if number == ROUNDS // 2:
                followers["late"] = follow()
            await system.feed(NUM_BLOCKS // ROUNDS, choose_faults(system, proxies, number), steady)
            if number == 2 * ROUNDS // 3:
                stopped.thaw()
            await check_claims(await system.feeder.truth(), followers)
        await settle(await system.feeder.truth(), followers, stopped)
        seconds = time.monotonic() - began_s
        print(f"{system.num_fed} block events in {seconds:.1f} s, {system.num_fed / seconds:.0f} a second")
        print(
            f"killed: publisher {system.num_publishers_killed}, feeder {system.num_feeders_killed} times,"
            f" {system.num_lost_sending} while it had to send"
        )
        for name, follower in followers.items():
            print(name, follower.source.state.value, follower.report().counters)
        print("stopped", await stopped.report())
        assert system.num_publishers_killed
        assert system.num_feeders_killed
        seen = steady.source.counters
        assert seen.connections_lost
        assert seen.restarts
        assert proxied.source.counters.connections_lost
        assert sum(proxy.num_resets for proxy in proxies)
        assert (await stopped.report()).counters["snapshots"] > 1


def choose_faults(system: System, proxies: list[TcpProxy], number: int) -> dict[int, Fault]:
    """Of this round: publisher and scheduler in some, the network in most; each at some point of it. Each
    kind comes at least once, but for stalls."""
    rng = system.rng
    chosen: list[Fault] = []
    if number in (1, ROUNDS - 2) or rng.random() < FAULT_CHANCE:
        chosen.append(system.restart_publisher)
    if number == ROUNDS // 2 + 1 or rng.random() < FAULT_CHANCE:
        chosen.append(system.kill_feeder)
    proxy = rng.choice(proxies)
    match {0: 1, 2: 2}.get(number, rng.randrange(4)):
        case 0:
            seconds = rng.uniform(0.2, 1.5)
            chosen.append(lambda: proxy.stall(seconds))
        case 1:
            seconds = rng.uniform(0.1, 1.0)
            chosen.append(lambda: proxy.swallow(seconds))
        case 2:
            chosen.append(lambda: reset(proxies[0]))
    # Not in the last slice, after which it would not begin.
    points = rng.sample(range(NUM_BLOCKS // ROUNDS - SLICE_BLOCKS), len(chosen))
    return dict(zip(points, chosen, strict=True))


async def reset(proxy: TcpProxy) -> None:
    async with asyncio.timeout(SETTLE_S):
        while not proxy.has_connections:
            await asyncio.sleep(0.02)
    proxy.reset()


async def check_claims(truth: Truth, followers: dict[str, Follower]) -> None:
    """The feeding pauses. The steady one gets to the truth, and whoever says exact has it or will at once."""
    steady = followers["steady"]
    async with asyncio.timeout(SETTLE_S):
        while not is_exact(steady, truth):
            await asyncio.sleep(0.02)
    for name, follower in followers.items():
        # A stalled connection shows what was true when it stalled, until the stall is over.
        end_s = time.monotonic() + LAG_S
        while follower.source.state is SourceState.EXACT and not follower.has(truth):
            assert time.monotonic() < end_s, f"{name} says exact and is not: {follower.notices}"
            await asyncio.sleep(0.02)


async def settle(truth: Truth, followers: dict[str, Follower], stopped: FollowerProcess) -> None:
    """The faults are over: all but the one without snapshots must become exact, with the truth."""
    for name, follower in followers.items():
        if name == "replayer":
            continue
        try:
            async with asyncio.timeout(SETTLE_S):
                while not is_exact(follower, truth):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{name}: {follower.report()}, {follower.notices}") from None
    replayer = followers["replayer"]
    assert replayer.source.state is SourceState.PARTIAL or replayer.has(truth)
    wanted = digest(truth)
    async with asyncio.timeout(SETTLE_S):
        while not ((report := await stopped.report()).is_exact and report.digest == wanted):
            await asyncio.sleep(0.1)


def is_exact(follower: Follower, truth: Truth) -> bool:
    return follower.source.state is SourceState.EXACT and follower.has(truth)
