"""A scheduler's event side as a process of its own, to be killed while it sends.

Run as a program it is that process: it sends when it is told how much, with a JSON line in and one out.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from support.cache_workload import CacheWorkload, Truth
from support.event_feeder import EventFeeder
from support.line_server import serve_lines

RESET_SHARE = 0.001
"""Of the steps, those after which everything is cleared."""
ANSWER_BYTES = 16 * 1024 * 1024
ANSWER_TIMEOUT_S = 60.0
NUM_REQUESTS = 12


class FeederLost(Exception):
    """It was killed before it had answered."""


@dataclass(frozen=True)
class Fed:
    num_blocks: int
    """Block events of this slice."""
    sent_ts: float
    """Wall time before its last batch was made."""


class FeederProcess:
    """`pause_s` between two steps. What a killed one held is gone, and what it had not sent yet is lost."""

    def __init__(self, intake_endpoint: str, folder: Path, *, seed: int, pause_s: float) -> None:
        self._arguments = [intake_endpoint, f"--seed={seed}", f"--pause-s={pause_s}"]
        self._log_path = folder / "feeder.log"
        self._process: asyncio.subprocess.Process | None = None
        self.was_killed = False

    async def start(self) -> None:
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                __file__,
                *self._arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=ANSWER_BYTES,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    async def feed(self, num_blocks: int) -> Fed:
        """Raises FeederLost."""
        return Fed(**json.loads(await self._ask({"feed": num_blocks})))

    async def truth(self) -> Truth:
        """What the caches hold now. Raises FeederLost."""
        facts = json.loads(await self._ask({"truth": True}))
        return Truth({(block_hash, group, medium): number for block_hash, group, medium, number in facts})

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self.was_killed = True
            self._process.kill()
            await self._process.wait()

    async def _ask(self, question: dict[str, int]) -> bytes:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                process.stdin.write(json.dumps(question).encode() + b"\n")
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        if answer.endswith(b"\n"):
            return answer
        assert self.was_killed, self._log_path.read_text()
        raise FeederLost


class _Feeding:
    def __init__(self, intake_endpoint: str, rng: random.Random, pause_s: float) -> None:
        self._rng = rng
        self._pause_s = pause_s
        workload = CacheWorkload(rng, num_blocks=1500, host_blocks=3000)
        self._feeder = EventFeeder(intake_endpoint, workload, queue_batches=1000)

    async def answer(self, question: dict[str, int]) -> object:
        if "feed" in question:
            return asdict(await self._feed(question["feed"]))
        return [[*fact, number] for fact, number in self._feeder.workload.truth().items()]

    async def _feed(self, num_blocks: int) -> Fed:
        feeder = self._feeder
        begin, sent_ts = feeder.num_blocks, 0.0
        while feeder.num_blocks < begin + num_blocks:
            now_ts = time.time()
            if feeder.step(num_requests=NUM_REQUESTS):
                sent_ts = now_ts
            if self._rng.random() < RESET_SHARE:
                feeder.reset()
            await asyncio.sleep(self._pause_s)
        return Fed(feeder.num_blocks - begin, sent_ts)


async def _serve(intake_endpoint: str, seed: int, pause_s: float) -> None:
    feeding = _Feeding(intake_endpoint, random.Random(seed), pause_s)
    await serve_lines(lambda line: feeding.answer(json.loads(line)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("intake_endpoint")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--pause-s", type=float, required=True)
    given = parser.parse_args()
    asyncio.run(_serve(given.intake_endpoint, given.seed, given.pause_s))
