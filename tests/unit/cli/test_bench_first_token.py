"""Where loading from Redis begins to pay."""

import math

import pytest

from reprise_cli.bench.first_token import break_even_tokens

LENGTHS = (500, 2000)


def seconds(*, recompute: float, external: float, local: float) -> dict[tuple[str, int], float]:
    """Of the shortest prompt; the longer one does not count."""
    sources = {"recompute": recompute, "external": external, "local": local}
    return {(name, length): value for name, value in sources.items() for length in LENGTHS}


def test_it_is_where_computing_costs_as_much_as_the_load() -> None:
    assert break_even_tokens(seconds(recompute=1.1, external=0.2, local=0.1), LENGTHS) == pytest.approx(50)


def test_it_is_at_least_a_block() -> None:
    assert break_even_tokens(seconds(recompute=1.1, external=0.1, local=0.1), LENGTHS) == 16


def test_a_model_that_computes_for_nothing_gains_nothing() -> None:
    assert math.isinf(break_even_tokens(seconds(recompute=0.1, external=0.2, local=0.1), LENGTHS))
