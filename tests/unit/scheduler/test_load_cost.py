"""When loading is worth it: measured lines, evidence, probing."""

import random

import pytest

from reprise_scheduler.sched.load_cost import (
    MIN_LOADS,
    MIN_STEPS,
    PROBE_EVERY,
    Line,
    LoadCost,
    LoadRule,
    slowest,
)

BLOCK = 16


def measured(
    *, token_s: float = 0.001, tier: str = "external", block_s: float, fixed_s: float = 0.0
) -> LoadCost:
    cost = LoadCost(LoadRule.MEASURED, BLOCK)
    for index in range(MIN_STEPS):
        cost.measure_step(100 + 50 * index, (100 + 50 * index) * token_s)
    for index in range(MIN_LOADS):
        num_blocks = 4 + 4 * index
        cost.measure_load([tier] * num_blocks, fixed_s + num_blocks * block_s)
    return cost


def test_a_line_finds_both_its_parts() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    line = Line()
    for _ in range(50):
        amount = rng.randint(1, 100)
        line.measure(amount, 0.2 + 0.01 * amount)
    assert line.seconds(0) == pytest.approx(0.2)
    assert line.seconds(1000) == pytest.approx(10.2)


def test_equal_amounts_are_taken_in_proportion() -> None:
    line = Line()
    for _ in range(10):
        line.measure(20, 2.0)
    assert line.seconds(10) == pytest.approx(1.0)


@pytest.mark.parametrize("points", [[(10, 5.0), (20, 1.0)], [(10, 1.0), (20, 5.0)]])
def test_no_part_is_ever_negative(points: list[tuple[float, float]]) -> None:
    line = Line()
    for point in points:
        line.measure(*point)
    assert 0 <= line.seconds(1) <= line.seconds(100)


def test_the_last_measurements_win() -> None:
    line = Line()
    for seconds in [10.0] * 50 + [1.0] * 50:
        line.measure(10, seconds)
    assert line.seconds(10) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("block_s", "worth"), [(0.001, 8), (0.1, 0)])
def test_what_is_slower_than_computing_is_not_loaded(block_s: float, worth: int) -> None:
    assert measured(block_s=block_s).num_worth_loading(["external"] * 8) == worth


def test_a_fixed_latency_makes_short_loads_not_worth_it() -> None:
    cost = measured(block_s=0.001, fixed_s=0.1)  # computing a block takes 16 ms
    assert cost.num_worth_loading(["external"] * 3) == 0
    assert cost.num_worth_loading(["external"] * 20) == 20


def test_the_part_in_a_faster_tier_is_loaded_alone() -> None:
    cost = measured(block_s=0.1)
    assert cost.num_worth_loading(["host", "host", "external", "host"]) == 2
    for num_blocks in range(1, 1 + MIN_LOADS):
        cost.measure_load(["host"] * num_blocks, num_blocks * 1.0)
    assert cost.num_worth_loading(["host", "host", "external", "host"]) == 0


def test_without_evidence_every_load_is_allowed() -> None:
    cost = LoadCost(LoadRule.MEASURED, BLOCK)
    for _ in range(MIN_LOADS - 1):
        cost.measure_load(["external"] * 4, 100.0)
    for _ in range(MIN_STEPS):
        cost.measure_step(100, 0.001)
    assert cost.num_worth_loading(["external"] * 4) == 4
    cost.measure_load(["external"] * 4, 100.0)
    assert cost.num_worth_loading(["external"] * 4) == 0
    assert cost.num_worth_loading(["host"] * 4) == 4
    untimed = LoadCost(LoadRule.MEASURED, BLOCK)
    for _ in range(MIN_LOADS):
        untimed.measure_load(["external"] * 4, 100.0)
    assert untimed.num_worth_loading(["external"] * 4) == 4


def test_the_rule_always_loads() -> None:
    cost = measured(block_s=100.0)
    cost.rule = LoadRule.ALWAYS
    assert cost.num_worth_loading(["external"] * 8) == 8


def test_now_and_then_a_slow_tier_is_tried_and_comes_back_when_it_is_fast_again() -> None:
    cost = measured(block_s=0.1)
    answers = [cost.num_worth_loading(["external"] * 8) for _ in range(2 * PROBE_EVERY)]
    assert answers.count(8) == 2
    probes = 0
    while cost.num_worth_loading(["external"] * 8) == 0 or probes < 60:
        cost.measure_load(["external"] * 8, 0.001)
        probes += 1
    assert cost.num_worth_loading(["external"] * 8) == 8
    assert cost.num_worth_loading(["external"] * 8) == 8


def test_the_slowest_tier_of_a_load() -> None:
    assert slowest(["host", "external", "disk"]) == "external"
    assert slowest(["host", "disk"]) == "disk"
