"""What the scheduler hands back after a step."""

from dataclasses import dataclass, replace

from reprise_core.errors import ErrorKind
from reprise_core.requests import FinishReason
from reprise_scheduler.sched.request import Request


@dataclass(slots=True)
class Output:
    """New tokens of one request, or its end, or both."""

    request: Request
    first_index: int
    """Index of the first token among the request's output tokens."""
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error_kind: str = ""
    error: str = ""
    logprobs: bytes = b""
    """A row per token, if asked for."""
    prompt_logprobs: bytes = b""
    """The prompt's rows, with the first token."""


def error_output(request: Request, kind: ErrorKind, problem: str) -> Output:
    return Output(
        request,
        request.num_output_tokens,
        [],
        FinishReason.ERROR,
        error_kind=kind.value,
        error=problem,
    )


@dataclass(slots=True)
class Counters:
    """Running sums since the start; whoever exports them takes differences."""

    preemptions: int = 0
    external_queried_tokens: int = 0
    external_hit_tokens: int = 0
    preempted_external_hit_tokens: int = 0
    """Apart from these: of requests that were preempted."""
    lookups_again: int = 0
    loads_started: int = 0
    load_failures: int = 0
    loads_skipped_slower: int = 0
    """Requests of which blocks were not loaded because computing them is faster."""
    loads_skipped_no_room: int = 0
    """Likewise because one load may not fill so much of the pool."""
    external_wait_timeouts: int = 0
    saves_offered: int = 0
    saves_dropped: int = 0
    stale_results: int = 0
    priority_cuts: int = 0

    def copy(self) -> "Counters":
        return replace(self)
