"""Draws one token per row of logits.

The only randomness is one uniform number per token, a function of (seed, output index). So a
request draws the same tokens after preemption, on another batch, or in another process, as long as
its logits are the same.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Below this a distribution is its maximum, and dividing by it would overflow.
GREEDY_BELOW_TEMPERATURE = 1e-5
ROWS_AT_ONCE = {"cpu": 1, "cuda": 32}
"""A CPU is fastest with what stays in its caches. A GPU with many rows, up to a limit on the float64 copies:
some six of them times the vocabulary are 0.25 GB for 152,000 tokens."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn. `banned_token_ids` are those that must not appear at this index."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    output_index: int = 0
    banned_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE or self.top_k == 1


def uniform(seed: int, output_index: int) -> float:
    """In [0, 1), with 53 bits."""
    words = f"{seed}:{output_index}".encode()
    return (int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 11) / 2**53


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """`logits`: (len(draws), vocab). May write into `logits`."""
    if not draws:
        return []
    banned = [(row, token_id) for row, draw in enumerate(draws) for token_id in draw.banned_token_ids]
    if banned:
        rows, token_ids = torch.tensor(banned, device=logits.device).unbind(dim=1)
        logits[rows, token_ids] = float("-inf")
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    random_rows = [row for row, draw in enumerate(draws) if not draw.greedy]
    at_once = ROWS_AT_ONCE[logits.device.type]
    for start in range(0, len(random_rows), at_once):
        rows_here = random_rows[start : start + at_once]
        drawn = _draw(logits[rows_here], [draws[row] for row in rows_here])
        for row, token_id in zip(rows_here, drawn, strict=True):
            chosen[row] = token_id
    return chosen


def _draw(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Inverse of the cumulative distribution, in vocabulary order, in float64."""
    temperatures, targets = logits.new_tensor(
        [[draw.temperature for draw in draws], [uniform(draw.seed, draw.output_index) for draw in draws]],
        dtype=torch.float64,
    )
    weights = torch.softmax(logits.double() / temperatures[:, None], dim=-1)
    vocab_size = weights.shape[1]
    cut = [row for row, draw in enumerate(draws) if 0 < draw.top_k < vocab_size]
    if cut:
        weights[cut] = _keep_top_k(weights[cut], [draws[row].top_k for row in cut])
    cut = [row for row, draw in enumerate(draws) if draw.top_p < 1.0]
    if cut:
        weights[cut] = _keep_top_p(weights[cut], [draws[row].top_p for row in cut])
    cumulative = weights.cumsum(dim=-1)
    indices = torch.searchsorted(cumulative, targets[:, None] * cumulative[:, -1:], right=True)[:, 0]
    drawn: list[int] = indices.tolist()
    # Rounding may put the target at the very end, behind the last token that has weight.
    last = {row: int(weights[row].nonzero()[-1]) for row, index in enumerate(drawn) if index == vocab_size}
    return [last.get(row, index) for row, index in enumerate(drawn)]


def _keep_top_k(weights: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    """Each row's `top_k` largest; those equal to the last of them stay too."""
    ordered = weights.topk(max(top_k)).values
    thresholds = ordered.gather(1, torch.tensor(top_k, device=weights.device)[:, None] - 1)
    return torch.where(weights >= thresholds, weights, 0.0)


def _keep_top_p(weights: torch.Tensor, top_p: Sequence[float]) -> torch.Tensor:
    """Each row's fewest most probable tokens whose share reaches `top_p`; at least one."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    dropped = before >= weights.new_tensor(top_p)[:, None] * ordered.sum(dim=-1, keepdim=True)
    dropped[:, 0] = False
    return torch.zeros_like(weights).scatter_(1, order, ordered.masked_fill_(dropped, 0.0))
