"""Draws follow the distribution, its cuts, and nothing but (seed, output index)."""

import bisect
import itertools
import math
import random
from collections import Counter

import pytest
import torch

from reprise_worker.sampler import ROWS_AT_ONCE, Draw, sample, uniform

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5])


def draws_of(count: int, **how: object) -> Counter[int]:
    rows = [Draw(temperature=1.0, seed=5, output_index=index, **how) for index in range(count)]  # type: ignore[arg-type]
    return Counter(sample(LOGITS.repeat(count, 1), rows))


def test_greedy_takes_the_first_maximum() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 1.0, 0.0]])
    assert sample(logits, [Draw(), Draw(temperature=1e-6)]) == [1, 0]


def test_nothing_to_draw() -> None:
    assert sample(torch.empty(0, 5), []) == []


def test_frequencies_follow_the_softmax() -> None:
    counted = draws_of(4000)
    expected = torch.softmax(LOGITS, 0)
    for token, share in enumerate(expected.tolist()):
        assert counted[token] / 4000 == pytest.approx(share, abs=0.03)


def test_temperature_sharpens() -> None:
    cold = [Draw(temperature=0.1, seed=1, output_index=index) for index in range(200)]
    assert Counter(sample(LOGITS.repeat(200, 1), cold))[1] > 190


@pytest.mark.parametrize(("top_k", "allowed"), [(1, {1}), (2, {1, 4}), (3, {1, 2, 4}), (5, {0, 1, 2, 3, 4})])
def test_top_k(top_k: int, allowed: set[int]) -> None:
    assert set(draws_of(500, top_k=top_k)) == allowed


# Shares: 1: .46, 4: .28, 2: .17, 0: .06, 3: .02.
@pytest.mark.parametrize(("top_p", "allowed"), [(0.0, {1}), (0.4, {1}), (0.5, {1, 4}), (0.8, {1, 2, 4})])
def test_top_p(top_p: float, allowed: set[int]) -> None:
    assert set(draws_of(500, top_p=top_p)) == allowed


def test_top_p_counts_what_top_k_left() -> None:
    assert set(draws_of(300, top_k=2, top_p=0.6)) == {1}  # .46 of .74 is enough


def test_banned_tokens_are_not_drawn() -> None:
    assert set(draws_of(300, banned_token_ids=(1, 4))) == {0, 2, 3}
    assert sample(LOGITS.repeat(1, 1), [Draw(banned_token_ids=(1,))]) == [4]


def test_a_row_does_not_depend_on_its_batch() -> None:
    row = Draw(temperature=0.9, seed=77, output_index=3)
    alone = sample(LOGITS.repeat(1, 1), [row])
    other = Draw(temperature=1.0, seed=1, output_index=0)
    together = sample(torch.stack([LOGITS.flip(0), LOGITS, LOGITS]), [other, row, other])
    assert together[1] == alone[0]


def plain_draw(logits: torch.Tensor, draw: Draw) -> int:
    """One row by the definition, in plain Python."""
    scores = [logit / draw.temperature for logit in logits.double().tolist()]
    weights = [math.exp(score - max(scores)) for score in scores]
    if draw.top_k:
        threshold = sorted(weights, reverse=True)[draw.top_k - 1]
        weights = [weight if weight >= threshold else 0.0 for weight in weights]
    if draw.top_p < 1:
        total, before = sum(weights), 0.0
        for place, index in enumerate(sorted(range(len(weights)), key=lambda i: -weights[i])):
            share, before = before / total, before + weights[index]
            if place and share >= draw.top_p:
                weights[index] = 0.0
    target = uniform(draw.seed, draw.output_index) * sum(weights)
    return bisect.bisect_right(list(itertools.accumulate(weights)), target)


@pytest.mark.parametrize("at_once", [1, 32])
def test_rows_of_all_kinds_in_one_batch(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than are drawn at once, each by its own parameters."""
    monkeypatch.setitem(ROWS_AT_ONCE, "cpu", at_once)
    chance = random.Random(4)
    logits = torch.randn(150, 300, generator=torch.Generator().manual_seed(2)) * 2
    rows = [
        Draw(
            temperature=chance.choice([0.4, 1.0, 1.7]),
            top_k=chance.choice([0, 0, 2, 7, 300]),
            top_p=chance.choice([1.0, 0.9, 0.3]),
            seed=row,
            output_index=row,
        )
        if chance.random() < 0.8
        else Draw()
        for row in range(150)
    ]
    drawn = sample(logits.clone(), rows)
    for token, row, draw in zip(drawn, logits, rows, strict=True):
        assert token == (int(row.argmax()) if draw.greedy else plain_draw(row, draw))


def test_noise_is_a_function_of_seed_and_index() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    values = {uniform(seed, index) for seed in range(50) for index in range(50)}
    assert len(values) == 2500
    assert all(0 <= value < 1 for value in values)
    assert sum(values) / 2500 == pytest.approx(0.5, abs=0.02)


def test_extreme_logits_stay_in_range() -> None:
    logits = torch.full((1, 8), float("-inf"))
    logits[0, 3] = 88.0
    assert sample(logits, [Draw(temperature=0.01, seed=9)]) == [3]
