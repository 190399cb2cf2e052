"""Draws follow the distribution, its cuts, and nothing but (seed, output index)."""

from collections import Counter

import pytest
import torch

from reprise_worker.sampler import Draw, sample, uniform

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
