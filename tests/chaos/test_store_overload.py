"""More is saved than Redis takes: memory stays within its limits, drops are counted, and steps do not notice.

A few seconds here; REPRISE_SOAK_S makes it longer (docs/soak.md).
"""

import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.external_engine import RealEngine, StoreAddress, real_engine
from support.service_process import ServiceProcess
from support.tiny_models import write_model_folder
from support.valkey_server import ValkeyProcess, free_port

MIB = 1024 * 1024
SECONDS = float(os.environ.get("REPRISE_SOAK_S", "6"))
PHASE_S = 1.0 if SECONDS < 60 else 5.0
SETTLE_S = 0.2
"""At the beginning of a phase, when what was queued in the one before is still on its way."""
CAPACITY_BYTES, QUEUE_BYTES, REDIS_BYTES = 32 * MIB, 16 * MIB, 32 * MIB
STORE_LIMIT_BYTES = CAPACITY_BYTES * 9 // 8 + QUEUE_BYTES + 64 * MIB
"""Of the shared arena; see the store's page. What is on the wire comes on top."""
STORE_SLACK_BYTES = 96 * MIB
"""Messages and pipelines in flight, and what Python keeps."""
REDIS_SLACK_BYTES = 48 * MIB
"""Redis' own, its clients' buffers, and what the allocator loses."""
MOST_MEDIAN_RATIO, MOST_P99_RATIO, P99_SLACK_S = 2.0, 4.0, 0.05
NUM_REQUESTS, NUM_TOKENS = 4, 40


@dataclass
class Figures:
    quiet_s: list[float] = field(default_factory=list)
    loaded_s: list[float] = field(default_factory=list)
    store_rss: list[int] = field(default_factory=list)
    redis_rss: list[int] = field(default_factory=list)
    num_dropped: list[float] = field(default_factory=list)
    """At the end of each loaded phase."""

    def step_ms(self, times_s: list[float]) -> tuple[float, float]:
        """Median and p99."""
        ordered = sorted(times_s)
        return statistics.median(ordered) * 1000, ordered[len(ordered) * 99 // 100] * 1000


class StepClock:
    """From one result to the next, as the scheduler sees them."""

    def __init__(self, engine: RealEngine) -> None:
        self.into: list[float] | None = None
        self._last_s: float | None = None
        loop = engine.harness.app._loop
        on_result = loop.on_result

        def timed(result: object) -> None:
            now_s = time.monotonic()
            if self._last_s is not None and self.into is not None:
                self.into.append(now_s - self._last_s)
            self._last_s = now_s if self.into is not None else None
            on_result(result)  # type: ignore[arg-type]

        loop.on_result = timed  # type: ignore[method-assign, assignment]


def rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def keep_generating(engine: RealEngine) -> None:
    rng = random.Random(1)

    async def one_after_another() -> None:
        while True:
            prompt = [rng.randrange(3, 97) for _ in range(33)]
            await engine.ask([prompt], NUM_TOKENS)

    await asyncio.gather(*(one_after_another() for _ in range(NUM_REQUESTS)))


@asynccontextmanager
async def flooding(redis_port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "support.save_flood", str(redis_port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def tell(process: asyncio.subprocess.Process, line: str) -> str:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n".encode())
    return await hear(process)


async def hear(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        line = await process.stdout.readline()
    assert line, "the flood ended"
    return line.decode().strip()


def sample(store: ServiceProcess, name: str, **labels: str) -> float:
    samples = (s for family in text_string_to_metric_families(store.metrics()) for s in family.samples)
    return sum(
        s.value for s in samples if s.name == f"reprise_store_{name}" and labels.items() <= s.labels.items()
    )


@pytest.mark.timeout(SECONDS * 2 + 240)
async def test_more_saves_than_redis_takes(tmp_path: Path) -> None:
    model = write_model_folder(
        tmp_path / "model", hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=64
    )
    redis = ValkeyProcess(
        tmp_path, "--maxmemory", str(REDIS_BYTES), "--maxmemory-policy", "volatile-lru"
    ).start()
    address = StoreAddress(f"127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}")
    store: ServiceProcess | None = None
    try:
        async with flooding(redis.port) as flood:
            proxy_port = await hear(flood)
            store = ServiceProcess(
                "store",
                tmp_path,
                metrics_port=free_port(),
                listen_address=address.grpc,
                blocks_endpoint=address.blocks,
                redis_url=f"redis://127.0.0.1:{proxy_port}/0",
                capacity_bytes=CAPACITY_BYTES,
                save_queue_bytes=QUEUE_BYTES,
                redis_timeout_s=10,
            )
            await asyncio.to_thread(store.wait_until_ready)
            base_rss = rss_bytes(store.pid)
            assert await tell(flood, f"store {address.blocks} {address.grpc}") == "ready"
            async with real_engine(model, address, worker={"block_size": 16}) as engine:
                figures, offered = await run_phases(engine, flood, store, redis)
            check(figures, base_rss)
            assert offered > 0
            # All its keys come and go within a second or so, and the generation stays.
            assert await asyncio.to_thread(sample, store, "generation_changes_total") == 0
            assert await asyncio.to_thread(sample, store, "save_queue_bytes") <= QUEUE_BYTES
            written = await asyncio.to_thread(
                sample, store, "saves_total", tier="external", outcome="written"
            )
            print(
                f"offered by the flood {offered}, written to Redis {written:.0f},"
                f" dropped {figures.num_dropped[-1]:.0f}"
            )
    finally:
        if store is not None:
            store.kill()
        redis.kill()


async def run_phases(
    engine: RealEngine, flood: asyncio.subprocess.Process, store: ServiceProcess, redis: ValkeyProcess
) -> tuple[Figures, int]:
    """Quiet and loaded ones in turn; blocks that the flood offered."""
    figures, clock, offered = Figures(), StepClock(engine), 0
    assert redis._process is not None
    traffic = asyncio.ensure_future(keep_generating(engine))
    try:
        ends_s = time.monotonic() + SECONDS
        while time.monotonic() < ends_s or not figures.loaded_s:
            for word, times_s in (("off", figures.quiet_s), ("on", figures.loaded_s)):
                offered = int(await tell(flood, word))
                await asyncio.sleep(SETTLE_S)
                clock.into = times_s
                phase_ends_s = time.monotonic() + PHASE_S
                while time.monotonic() < phase_ends_s:
                    await asyncio.sleep(0.25)
                    assert not traffic.done(), traffic.exception()
                    figures.store_rss.append(rss_bytes(store.pid))
                    figures.redis_rss.append(rss_bytes(redis._process.pid))
                clock.into = None
            figures.num_dropped.append(await asyncio.to_thread(sample, store, "saves_dropped_total"))
        offered = int(await tell(flood, "off"))
    finally:
        traffic.cancel()
        await asyncio.gather(traffic, return_exceptions=True)
    return figures, offered


def check(figures: Figures, base_rss: int) -> None:
    (quiet_ms, quiet_p99_ms), (loaded_ms, loaded_p99_ms) = map(
        figures.step_ms, (figures.quiet_s, figures.loaded_s)
    )
    store_mib, redis_mib = (max(samples) / MIB for samples in (figures.store_rss, figures.redis_rss))
    store_limit = base_rss + STORE_LIMIT_BYTES + STORE_SLACK_BYTES
    redis_limit = REDIS_BYTES + REDIS_SLACK_BYTES
    half = len(figures.store_rss) // 2
    print(
        f"\n{SECONDS:.0f} s: steps quiet {quiet_ms:.2f} ms (p99 {quiet_p99_ms:.1f}), overloaded"
        f" {loaded_ms:.2f} ms (p99 {loaded_p99_ms:.1f}), {len(figures.quiet_s)} and"
        f" {len(figures.loaded_s)} steps;"
        f" store {base_rss / MIB:.0f} MiB at start, {store_mib:.0f} at most of {store_limit / MIB:.0f}"
        f" (first half {max(figures.store_rss[:half]) / MIB:.0f}, second"
        f" {max(figures.store_rss[half:]) / MIB:.0f}); Redis {redis_mib:.0f} MiB at most of"
        f" {redis_limit / MIB:.0f}"
    )
    grew = [now > before for before, now in pairwise([0.0, *figures.num_dropped])]
    assert sum(grew) > 0.9 * len(grew), f"no overload in {grew.count(False)} of {len(grew)} phases"
    assert max(figures.store_rss) <= store_limit
    assert max(figures.redis_rss) <= redis_limit
    assert loaded_ms <= MOST_MEDIAN_RATIO * quiet_ms
    assert loaded_p99_ms <= MOST_P99_RATIO * quiet_p99_ms + P99_SLACK_S * 1000
