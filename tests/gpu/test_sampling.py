"""Draws and log-probabilities on the device are those of a CPU for the same logits."""

import random

import pytest
import torch

from reprise_worker.logprobs import measure
from reprise_worker.sampler import Draw, sample
from support.gpu import DEVICE, needs_device

pytestmark = needs_device
VOCAB = 32_000


def logits_of(num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)


def draws_of(num_rows: int) -> list[Draw]:
    chance = random.Random(9)
    return [
        Draw(
            temperature=chance.choice([0.0, 0.3, 0.8, 1.0, 2.0]),
            top_k=chance.choice([0, 0, 1, 5, 40, VOCAB]),
            top_p=chance.choice([1.0, 0.95, 0.5, 0.0]),
            seed=chance.getrandbits(64),
            output_index=chance.randrange(1000),
            banned_token_ids=tuple(chance.sample(range(VOCAB), chance.choice([0, 0, 3]))),
        )
        for _ in range(num_rows)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_tokens_are_drawn(dtype: torch.dtype) -> None:
    logits, draws = logits_of(200, dtype), draws_of(200)
    on_cpu = sample(logits.clone(), draws)
    assert len(set(on_cpu)) > 100
    assert sample(logits.to(DEVICE), draws) == on_cpu
    alone = [sample(logits[row : row + 1].to(DEVICE), [draw]) for row, draw in enumerate(draws)]
    assert alone == [[token_id] for token_id in on_cpu]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_logprobs_are_measured(dtype: torch.dtype) -> None:
    logits = logits_of(300, dtype)
    token_ids = [random.Random(1).randrange(VOCAB) for _ in range(300)]
    ours, theirs = measure(logits, token_ids, 20), measure(logits.to(DEVICE), token_ids, 20)
    for name in ("logprobs", "top_logprobs"):
        assert getattr(theirs, name) == pytest.approx(getattr(ours, name), abs=1e-4), name
    # Equal logits, which 8 bits have many of, may come in any order.
    if dtype is torch.float32:
        assert (theirs.top_ids == ours.top_ids).mean() > 0.999
        assert abs(theirs.ranks - ours.ranks).max() <= 1
