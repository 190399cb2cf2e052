"""The one-process engine under the load of `reprise bench split`, as a process of its own.

`python -m reprise_cli.bench.split_single MODEL` runs one round per line read and prints its seconds.
"""

import asyncio
import sys
import time
from pathlib import Path

from reprise_cli.bench.split import NUM_BLOCKS, OUTPUT_TOKENS, prompts
from reprise_cli.one_process import OneProcessEngine
from reprise_core.requests import SamplingParams
from reprise_scheduler.settings import SchedulerSettings
from reprise_worker.settings import WorkerSettings


async def _serve(model_path: Path) -> None:
    engine = OneProcessEngine(
        SchedulerSettings(publisher_endpoint=""),
        WorkerSettings(model_path=str(model_path), num_blocks=NUM_BLOCKS, store_endpoint=""),
    )
    await engine.start()
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(await _round(engine, int(line)), flush=True)
    await engine.stop()


async def _round(engine: OneProcessEngine, number: int) -> float:
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    start_s = time.perf_counter()
    answers = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts(number)))
    seconds = time.perf_counter() - start_s
    assert all(len(answer) == OUTPUT_TOKENS for answer in answers)
    return seconds


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
