"""The log-probabilities that a step's requests asked for, from the step's raw logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from reprise_core.steps import RequestLogprobs
from reprise_worker.batch import ScheduledTokens

_ROWS_AT_ONCE = 128
"""Limit on the float32 copies: these rows times the vocabulary."""
_Array = npt.NDArray[Any]


class StepLogprobs:
    """Of one step. To be made before tokens are drawn, for the draw may write into the logits.

    `logits`: (num_sampled + num_prompt_rows, vocab), in the order of `Batch.logit_rows`.
    """

    def __init__(self, items: Sequence[ScheduledTokens], logits: torch.Tensor) -> None:
        states = [item.state for item in items if item.sample]
        self._num_drawn = len(states)
        self._rows = [row for row, state in enumerate(states) if state.sampling.num_logprobs is not None]
        self._asking = [states[row] for row in self._rows]
        self._drawn = logits[self._rows] if self._rows else None
        self._items = [item for item in items if item.num_prompt_rows]
        self._of_prompts = logits[self._num_drawn :]

    def of_tokens(self, token_ids: Sequence[int]) -> tuple[RequestLogprobs, ...]:
        """`token_ids`: the step's drawn tokens. One entry for each request that asked for anything."""
        outputs: dict[int, bytes] = {}
        if self._drawn is not None:
            tops = [state.sampling.num_logprobs or 0 for state in self._asking]
            measured = measure(self._drawn, [token_ids[row] for row in self._rows], max(tops))
            for row, (state, num_top) in enumerate(zip(self._asking, tops, strict=True)):
                outputs[state.handle] = measured.pack(row, row + 1, num_top)
        prompts = self._prompt_rows() if self._items else {}
        return tuple(
            RequestLogprobs(handle, outputs.get(handle, b""), prompts.get(handle, b""))
            for handle in dict.fromkeys((*outputs, *prompts))
        )

    def _prompt_rows(self) -> dict[int, bytes]:
        rows: dict[int, bytes] = {}
        start = 0
        for item in self._items:
            stop = start + item.num_prompt_rows
            num_top = item.state.sampling.num_prompt_logprobs or 0
            after = item.num_computed + 1
            token_ids = item.state.tokens.view[after : after + item.num_prompt_rows].tolist()
            measured = measure(self._of_prompts[start:stop], token_ids, num_top)
            rows[item.state.handle] = measured.pack(0, stop - start, num_top)
            start = stop
        return rows


@dataclass(frozen=True, slots=True)
class Measured:
    """One entry, or one row of `top_ids` and `top_logprobs`, per position."""

    logprobs: _Array
    ranks: _Array
    top_ids: _Array
    top_logprobs: _Array

    def pack(self, start: int, stop: int, num_top: int) -> bytes:
        """Positions [start, stop) as rows, each with the first `num_top` of the most probable tokens."""
        packed = np.empty((stop - start, 2 + 2 * num_top), dtype="<u4")
        packed[:, 0] = self.logprobs[start:stop].astype("<f4").view("<u4")
        packed[:, 1] = self.ranks[start:stop]
        packed[:, 2 : 2 + num_top] = self.top_ids[start:stop, :num_top]
        packed[:, 2 + num_top :] = np.ascontiguousarray(
            self.top_logprobs[start:stop, :num_top], dtype="<f4"
        ).view("<u4")
        return packed.tobytes()


@torch.inference_mode()
def measure(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> Measured:
    """`logits`: (len(token_ids), vocab), raw. Ranks count the tokens that are more probable, and one."""
    parts: list[tuple[torch.Tensor, ...]] = []
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        stop = start + _ROWS_AT_ONCE
        scores = logits[start:stop].float().log_softmax(dim=-1)
        chosen = scores.gather(1, torch.tensor(token_ids[start:stop], device=scores.device)[:, None])
        top = scores.topk(num_top)
        parts.append((chosen[:, 0], (scores > chosen).sum(dim=-1) + 1, top.indices, top.values))
    columns = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
    return Measured(*columns)
