"""What can go wrong between a worker and Redis, each while blocks are loaded and while they are saved.

Every answer has the tokens of an undisturbed run, nothing hangs or leaks, every service stays ready, the
fault is counted under its reason, and afterwards blocks are saved and found again without a restart.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
import pytest_asyncio
from redis import Redis

from support.external_engine import BLOCK
from support.external_world import World, external_tokens, num_full_blocks, prompts_of, world
from support.waiting import until

PASSWORD = "secret"
pytestmark = pytest.mark.asyncio(loop_scope="module")

Act = Callable[[World], Awaitable[None]]


async def nothing(world: World) -> None: ...


@dataclass(frozen=True)
class Fault:
    begin: Act
    end: Act
    when_loading: tuple[str, dict[str, str]] | None
    """The metric that counts it, of the worker or the store, with its labels; None: loads do not mind."""
    when_saving: tuple[str, dict[str, str]]
    dropped_as: str = ""
    """What becomes of saves that meet it; empty = nothing, they wait until it is over."""


async def kill(world: World) -> None:
    world.redis.kill()


async def start(world: World) -> None:
    await asyncio.to_thread(world.redis.start)


async def pause(world: World) -> None:
    world.redis.pause()


async def resume(world: World) -> None:
    world.redis.resume()


async def change_password(world: World) -> None:
    world.redis.kill()
    world.redis.password = "changed"
    await start(world)


async def change_it_back(world: World) -> None:
    world.redis.kill()
    world.redis.password = PASSWORD
    await start(world)


async def fill_up(world: World) -> None:
    await world.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    await world.command("CONFIG", "SET", "maxmemory", "1mb")


async def make_room(world: World) -> None:
    await world.command("CONFIG", "SET", "maxmemory", "0")


async def delay(world: World) -> None:
    world.proxy.delay_s = 2.0


async def stop_delaying(world: World) -> None:
    world.proxy.delay_s = 0.0


async def break_connections(world: World) -> None:
    for _ in range(6):
        await asyncio.sleep(0.05)
        world.proxy.reset()


def to_each_value(change: Callable[[bytes, int], bytes | None]) -> Act:
    """Replaces every block in Redis; None deletes it."""

    def change_all(redis: Redis) -> None:
        keys = [key for key in redis.scan_iter() if key.count(b":") > 2]
        for number, (key, value) in enumerate(zip(keys, redis.mget(keys) if keys else [], strict=True)):
            if value is not None and (changed := change(value, number)) != value:
                redis.set(key, changed) if changed is not None else redis.delete(key)

    async def act(world: World) -> None:
        with Redis(port=world.redis.port, password=world.redis.password) as redis:
            await asyncio.to_thread(change_all, redis)

    return act


def truncate(value: bytes, number: int) -> bytes:
    return value[: 64 + number % 1000]


def flip(value: bytes, number: int) -> bytes:
    place = max(64, number * 37 % len(value)) % len(value)
    return value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]


def of_another_model(value: bytes, number: int) -> bytes:
    return value[:24] + bytes(16) + value[40:]  # the fingerprint in the header


def drop_half(value: bytes, number: int) -> bytes | None:
    return None if number % 2 else value


DOWN = ("redis_failures_total", {"kind": "down"})


def failed(reason: str) -> tuple[str, dict[str, str]]:
    return "loads_failed_total", {"reason": reason}


NO_ROOM = ("saves_dropped_total", {"reason": "no_room"})
# A server that was killed comes back empty, so nobody knows what was reset meanwhile.
OUTAGES = {
    "killed": Fault(kill, start, failed("missing"), DOWN, "stale"),
    "paused": Fault(pause, resume, failed("missing"), DOWN),
    "full": Fault(fill_up, make_room, None, NO_ROOM, "no_room"),
    "password changed": Fault(change_password, change_it_back, failed("missing"), DOWN, "stale"),
    "two seconds away": Fault(delay, stop_delaying, failed("missing"), DOWN),
    "connections reset": Fault(break_connections, nothing, DOWN, DOWN),
}
DAMAGE = {
    "truncated": (truncate, "damaged"),
    "a bit of the payload flipped": (flip, "damaged"),
    "of another model": (of_another_model, "foreign"),
    "half of them gone": (drop_half, "missing"),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """One for all: each fault meets what those before it left."""
    async with world(tmp_path_factory.mktemp("world"), password=PASSWORD) as made:
        yield made


def count_of(world: World, metric: tuple[str, dict[str, str]]) -> float:
    name, labels = metric
    return world.engine.worker_metric(name, **labels) + world.store.metric(name, **labels)


async def recovered(world: World, name: str) -> None:
    """Of the fault that has just ended; by itself, under traffic."""
    ended_s = time.monotonic()
    await until(lambda: world.store.app.store.stats().redis_connected, 30)
    read_s, written = time.monotonic() - ended_s, world.written
    async with asyncio.timeout(30):
        # One batch after each cooldown is let through, to see whether writes are taken again.
        while world.written == written:
            prompts = prompts_of(world.rng, 1, 2)
            await world.ask(prompts, world.model.right(prompts))
            await world.settled()
    took_s = time.monotonic() - ended_s
    print(f"{name}: after the fault Redis is read in {read_s:.2f} s and written in {took_s:.2f} s")
    await world.check_all_is_well()


@pytest.mark.parametrize("name", OUTAGES)
async def test_redis_is_lost_while_blocks_are_loaded(shared: World, name: str) -> None:
    await lose_while_loading(shared, name, OUTAGES[name], at_least_s=0.0)


async def test_redis_hangs_for_ten_seconds_while_blocks_are_loaded(shared: World) -> None:
    await lose_while_loading(shared, "ten seconds", OUTAGES["paused"], at_least_s=10.0)


async def lose_while_loading(shared: World, name: str, fault: Fault, *, at_least_s: float) -> None:
    prompts, right = await shared.fill()
    before = count_of(shared, fault.when_loading) if fault.when_loading else 0
    shared.gate.close()
    names = shared.engine.submit(prompts, 6)
    await until(lambda: shared.gate.num_waiting == len(prompts))
    began_s = time.monotonic()
    fault_begins = asyncio.ensure_future(fault.begin(shared))
    if name == "connections reset":
        shared.proxy.delay_s = 0.02
    else:
        await fault_begins
    shared.gate.open()
    answers = await shared.engine.answers(names)
    took_s = time.monotonic() - began_s
    assert [answer.token_ids for answer in answers] == right
    await fault_begins
    print(f"{name}: answers after {took_s:.2f} s, {external_tokens(answers)} tokens from Redis")
    if fault.when_loading is None:
        assert external_tokens(answers) == num_full_blocks(prompts) * BLOCK
    else:
        assert count_of(shared, fault.when_loading) > before
    shared.check_ready()
    while time.monotonic() - began_s < at_least_s:
        # Serving goes on, and does not wait for Redis.
        more = prompts_of(shared.rng, 1, 5)
        asked_s = time.monotonic()
        await shared.ask(more, shared.model.right(more))
        assert time.monotonic() - asked_s < 5
        await asyncio.sleep(0.5)
    shared.proxy.delay_s = 0.0
    await fault.end(shared)
    await recovered(shared, name)


@pytest.mark.parametrize("name", OUTAGES)
async def test_redis_is_lost_while_blocks_are_saved(shared: World, name: str) -> None:
    fault = OUTAGES[name]
    prompts = prompts_of(shared.rng)
    right = shared.model.right(prompts)
    await shared.settled()
    sums = Saves(shared)
    before, saved = count_of(shared, fault.when_saving), shared.engine.worker_metric("saves_total")
    shared.proxy.delay_s = 0.05
    names = shared.engine.submit(prompts, 6)
    await until(lambda: shared.engine.worker_metric("saves_total") > saved)
    await fault.begin(shared)
    answers = await shared.engine.answers(names)
    assert [answer.token_ids for answer in answers] == right
    await shared.handed_over()
    if count_of(shared, fault.when_saving) == before:  # it was too late for these
        more = prompts_of(shared.rng)
        await shared.ask(more, shared.model.right(more))
        await until(lambda: count_of(shared, fault.when_saving) > before)
    shared.check_ready()
    shared.proxy.delay_s = 0.0
    await fault.end(shared)
    await until(lambda: shared.store.app.store.stats().redis_connected, 30)
    await shared.settled()
    sums.check(fault.dropped_as)
    await shared.engine.forget()
    await shared.ask(prompts, right)  # whatever part of them was saved
    await recovered(shared, name)


class Saves:
    """What became of the blocks that are saved from here on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._before = self._sums()

    def _sums(self) -> Counter[str]:
        store = self._world.store
        reasons = ("queue_full", "expired", "unavailable", "no_room", "stale")
        sums = Counter(
            {reason: int(store.metric("saves_dropped_total", reason=reason)) for reason in reasons}
        )
        sums["written"] = int(self._world.written)
        sums["offered"] = store.app.store.stats().saves
        return sums

    def check(self, dropped_as: str) -> None:
        """Every block is accounted for, and dropped only for this reason."""
        sums = self._sums()
        sums.subtract(self._before)
        offered, written = sums.pop("offered"), sums.pop("written")
        print(f"of {offered} blocks {written} were written, dropped {+sums}")
        assert set(+sums) <= {dropped_as}
        assert offered == written + sums.total()


@pytest.mark.parametrize("name", DAMAGE)
async def test_values_are_spoilt_before_they_are_loaded(shared: World, name: str) -> None:
    change, reason = DAMAGE[name]
    prompts, right = await shared.fill()
    before = count_of(shared, failed(reason))
    shared.gate.close()
    names = shared.engine.submit(prompts, 6)
    await until(lambda: shared.gate.num_waiting == len(prompts))
    await to_each_value(change)(shared)
    shared.gate.open()
    answers = await shared.engine.answers(names)
    assert [answer.token_ids for answer in answers] == right
    assert count_of(shared, failed(reason)) > before
    assert external_tokens(answers) <= num_full_blocks(prompts) * BLOCK // 2
    # What was computed instead replaces what was spoilt.
    await shared.settled()
    await shared.check_all_is_well()


@pytest.mark.parametrize("name", DAMAGE)
async def test_values_are_spoilt_while_they_are_saved(shared: World, name: str) -> None:
    change, reason = DAMAGE[name]
    before = count_of(shared, failed(reason))
    prompts = prompts_of(shared.rng)
    right = shared.model.right(prompts)
    async with going_on(to_each_value(change), shared):
        await shared.ask(prompts, right)
        await shared.settled()
    await to_each_value(change)(shared)
    await shared.engine.forget()
    answers = await shared.ask(prompts, right)
    if name == "half of them gone":
        # Look-ups see that: nobody is promised what is not there.
        assert external_tokens(answers) < num_full_blocks(prompts) * BLOCK
    else:
        assert count_of(shared, failed(reason)) > before
    await shared.check_all_is_well()


@asynccontextmanager
async def going_on(act: Act, world: World) -> AsyncIterator[None]:
    async def again_and_again() -> None:
        while True:
            await act(world)
            await asyncio.sleep(0.01)

    task = asyncio.ensure_future(again_and_again())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
