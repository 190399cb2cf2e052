"""The engine in one process: the measure for the split must itself be right."""

import asyncio
from pathlib import Path

import torch

from reprise_cli.bench.split import NUM_REQUESTS, split_rows
from reprise_cli.one_process import OneProcessEngine
from reprise_core.requests import SamplingParams
from reprise_scheduler.settings import SchedulerSettings
from reprise_worker.model import load_model
from reprise_worker.settings import WorkerSettings
from support.tiny_models import plain_greedy, write_model_folder


def engine(folder: Path, **scheduler: object) -> OneProcessEngine:
    settings = {"publisher_endpoint": "", **scheduler}
    return OneProcessEngine(
        SchedulerSettings(**settings),
        WorkerSettings(model_path=str(folder), num_blocks=40, block_size=4, store_endpoint=""),
    )


async def test_it_gives_the_models_own_greedy_tokens_also_when_blocks_run_short(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    prompts = [[3 + (i * 7 + j) % 50 for j in range(10 + i)] for i in range(8)]
    model = load_model(folder, device=torch.device("cpu"), dtype="auto")
    wanted = [plain_greedy(model, prompt, 20) for prompt in prompts]
    one = engine(folder)
    await one.start()
    try:
        sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        answers = await asyncio.gather(*(one.generate(prompt, sampling) for prompt in prompts))
        assert answers == wanted
        assert one.events.num_events > 0
        assert one.registry.get_sample_value(
            "vllm:generation_tokens_total", {"model_name": "model", "engine": "0"}
        ) == 20 * len(prompts)
    finally:
        await one.stop()


def test_the_benchmark_measures_both_sides(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", vocab_size=20_100, max_position_embeddings=256)
    rows = {row.case: row for row in split_rows(repeats=2, model_path=folder)}
    assert NUM_REQUESTS == 8
    assert rows["generation, split"].value > 0
    assert rows["generation, split"].peer_value == rows["generation, one process"].value
    assert rows["share, lowest pair"].value <= rows["share, median of pairs"].value
