"""When a request ends by itself."""

from collections.abc import Container

from reprise_core.requests import FinishReason
from reprise_scheduler.sched.request import Request


def end_of(
    request: Request, token_id: int, eos_token_ids: Container[int], max_model_len: int
) -> tuple[FinishReason | None, int | None]:
    """Whether the token just appended ends the request, and the stop token if one did."""
    sampling = request.sampling
    num_output = request.num_output_tokens
    if num_output >= sampling.min_tokens:
        is_eos = token_id in eos_token_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            return FinishReason.STOP, token_id
    if num_output >= sampling.max_tokens or request.num_tokens >= max_model_len:
        return FinishReason.LENGTH, None
    return None, None
