"""A plan in the making, and the messages it is made of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from reprise_core.ids import BlockId
from reprise_core.steps import AddedRequest, BlockLoad, ScheduledRequest, WorkerSampling, pack_ids
from reprise_scheduler.sched.request import Request

MAX_PROMPT_POSITIONS = 2048
"""Positions of one plan whose logits are wanted to measure prompts: a worker holds all of them at once,
each as large as the vocabulary. Where prompts cannot be computed in chunks this limits nothing."""


@dataclass(slots=True)
class ScheduledPart:
    """One request's part of a plan."""

    request: Request
    num_new_tokens: int
    new_block_ids: list[list[BlockId]]
    sample: bool
    added: bool = False
    """The worker is given the whole state, for it does not have the request."""
    handle: int = 0
    end_token: int = 0
    """Computed tokens once the step is done."""
    tables: Sequence[Sequence[BlockId]] = ()
    """The request's, as this plan leaves them; only where the step fills a block."""

    def message(self) -> ScheduledRequest:
        """As the request stands before the plan is sealed."""
        new_blocks = () if self.added else tuple(pack_ids(ids) for ids in self.new_block_ids)
        request = self.request
        return ScheduledRequest(
            request.handle, request.num_computed_tokens, self.num_new_tokens, new_blocks, self.sample
        )


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    budget: int
    prompt_positions: int = MAX_PROMPT_POSITIONS
    scheduled: dict[int, ScheduledPart] = field(default_factory=dict)
    """By the request's sequence."""
    loads: list[BlockLoad] = field(default_factory=list)
    preempted: bool = False


@dataclass(slots=True)
class InFlightStep:
    step_id: int
    parts: list[ScheduledPart]


def added_message(
    request: Request, tables: Sequence[Sequence[BlockId]], eos_token_ids: Iterable[int]
) -> AddedRequest:
    """Everything that a worker which does not have the request needs of it."""
    sampling = request.sampling
    banned = (*eos_token_ids, *sampling.stop_token_ids) if sampling.min_tokens else ()
    return AddedRequest(
        request.handle,
        pack_ids(request.token_ids),
        request.num_prompt_tokens,
        request.num_computed_tokens,
        tuple(pack_ids(table) for table in tables),
        WorkerSampling(
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.seed,
            sampling.min_tokens,
            pack_ids(banned),
            sampling.logprobs,
            sampling.prompt_logprobs if request.skip_lookup else None,
        ),
        request.adapter_id,
    )
