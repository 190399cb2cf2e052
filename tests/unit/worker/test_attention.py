"""Attention over gathered blocks against the plain formula, in float64."""

import pytest
import torch

from reprise_worker import attention
from reprise_worker.attention import LayerCall, _attend

NUM_HEADS, NUM_KV_HEADS, DIM = 6, 2, 8
CONTEXT = 37


def formula(call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal; the queries are the last of the context."""
    num_new, context = query.shape[2], key.shape[2]
    key, value = (part.double().repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for part in (key, value))
    scores = query.double() @ key.transpose(2, 3) * (call.scale or DIM**-0.5)
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    hidden = torch.ones(num_new, context, dtype=torch.bool).triu(context - num_new + 1)
    weights = scores.masked_fill(hidden, float("-inf")).exp()
    total = weights.sum(dim=-1, keepdim=True)
    if call.sinks is not None:
        total = total + call.sinks.double().exp().reshape(1, -1, 1, 1)
    return weights / total @ value


CALLS = {
    "plain": LayerCall(0, None),
    "scaled": LayerCall(0, 0.3),
    "capped": LayerCall(0, None, softcap=2.0),
    "sinks": LayerCall(0, None, sinks=torch.linspace(-1, 1, NUM_HEADS)),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> LayerCall:
    return CALLS[request.param]


def random_parts(num_new: int, group: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_new)
    key, value = torch.randn(2, group, NUM_KV_HEADS, CONTEXT, DIM).unbind()
    return torch.randn(group, NUM_HEADS, num_new, DIM), key, value


@pytest.mark.parametrize("num_new", [2, 20, CONTEXT])
@pytest.mark.parametrize("scores_at_once", [1, 1000, 1 << 26])
def test_without_a_mask_the_new_tokens_are_the_last(
    call: LayerCall, num_new: int, scores_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_SCORES_AT_ONCE", scores_at_once)
    parts = random_parts(num_new)
    expected = formula(call, *parts)
    assert torch.allclose(_attend(call, *parts, visible=None).double(), expected, atol=1e-5)
    seen = torch.ones(num_new, CONTEXT, dtype=torch.bool).tril(CONTEXT - num_new)[None, None]
    assert torch.allclose(_attend(call, *parts, visible=seen).double(), expected, atol=1e-5)


def test_decodes_of_different_lengths(call: LayerCall) -> None:
    query, key, value = random_parts(1, group=3)
    lengths = torch.tensor([CONTEXT, 1, 16])
    visible = (torch.arange(CONTEXT) < lengths[:, None])[:, None, None]
    out = _attend(call, query, key, value, visible=visible)
    assert out.shape == (3, NUM_HEADS, 1, DIM)
    for row, length in enumerate(lengths.tolist()):
        own = slice(row, row + 1)
        expected = formula(call, query[own], key[own, :, :length], value[own, :, :length])
        assert torch.allclose(out[own].double(), expected, atol=1e-5)
