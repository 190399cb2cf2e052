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
    for row, draw in enumerate(draws):
        if draw.banned_token_ids:
            logits[row, list(draw.banned_token_ids)] = float("-inf")
    token_ids: list[int] = logits.argmax(dim=-1).tolist()
    for row, draw in enumerate(draws):
        if not draw.greedy:
            token_ids[row] = _draw(logits[row], draw)
    return token_ids


def _draw(logits: torch.Tensor, draw: Draw) -> int:
    """Inverse of the cumulative distribution, in vocabulary order, in float64."""
    weights = torch.softmax(logits.double() / draw.temperature, dim=-1)
    if 0 < draw.top_k < weights.numel():
        threshold = weights.topk(draw.top_k).values[-1]
        weights = torch.where(weights >= threshold, weights, 0.0)
    if draw.top_p < 1.0:
        weights = _keep_top_p(weights, draw.top_p)
    cumulative = weights.cumsum(dim=-1)
    target = uniform(draw.seed, draw.output_index) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, target, right=True))
    # Rounding may put the target at the very end, behind the last token that has weight.
    return index if index < weights.numel() else int(weights.nonzero()[-1])


def _keep_top_p(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """The fewest most probable tokens whose share reaches `top_p`; at least one."""
    ordered, order = weights.sort(descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    dropped = before >= top_p * ordered.sum()
    dropped[0] = False
    return weights.index_fill(0, order[dropped], 0.0)
