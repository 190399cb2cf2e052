"""Log-probabilities by transformers alone, and whether packed rows are those."""

from collections.abc import Sequence

import torch

from reprise_core.logprobs import row_nbytes, unpack_rows
from reprise_worker import attention
from reprise_worker.model import PagedModel


@torch.inference_mode()
def plain_scores(model: PagedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Log-softmax in float32 after each token, by the model's eager attention: (len(token_ids), vocab)."""
    model.hf.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = model.hf(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits.float().log_softmax(dim=-1)
    finally:
        model.hf.set_attn_implementation(attention.IMPLEMENTATION)


def check_rows(
    rows: bytes, num_top: int, token_ids: Sequence[int], scores: torch.Tensor, *, tolerance: float
) -> None:
    """`rows` are of `token_ids`, one by one; `scores`: (len(token_ids), vocab)."""
    assert len(rows) == len(token_ids) * row_nbytes(num_top)
    for row, token_id, right in zip(unpack_rows(rows, num_top), token_ids, scores, strict=True):
        value = float(right[token_id])
        assert abs(row.logprob - value) < tolerance
        # Of tokens that are nearer than the tolerance the order is open.
        assert (right > value + tolerance).sum() < row.rank <= (right > value - tolerance).sum()
        assert len(set(row.top_ids)) == num_top
        assert list(row.top_logprobs) == sorted(row.top_logprobs, reverse=True)
        best = right.topk(num_top).values.tolist() if num_top else []
        for top_id, top_value, best_value in zip(row.top_ids, row.top_logprobs, best, strict=True):
            assert abs(top_value - best_value) < tolerance
            assert abs(top_value - float(right[top_id])) < tolerance
