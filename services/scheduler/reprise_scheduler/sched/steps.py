"""Steps in flight: from a draft to its plan, and from a result to tokens."""

from collections import deque

from reprise_core.steps import (
    AddedRequest,
    BlockSave,
    RequestLogprobs,
    ScheduledRequest,
    StepPlan,
    StepResult,
    unpack_ids,
)
from reprise_scheduler.sched.draft import Draft, InFlightStep, ScheduledPart, added_message
from reprise_scheduler.sched.outputs import Output
from reprise_scheduler.sched.request import Request
from reprise_scheduler.sched.state import EngineState
from reprise_scheduler.sched.stopping import end_of


class Steps:
    """Invariant: plans are numbered from 1 within a session, and their results are applied in that order."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._last_step_id = 0
        self._in_flight: deque[InFlightStep] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def forget(self) -> None:
        """The worker is lost: no result will come, and the next session counts from 1."""
        self._in_flight.clear()
        self._last_step_id = 0

    def seal(self, draft: Draft, saves: tuple[BlockSave, ...]) -> StepPlan | None:
        state = self._state
        taken = state.manager.take_copies()
        copies = tuple((copy.group_id, copy.source, copy.target) for copy in taken)
        if not (draft.scheduled or draft.loads or saves or state.removed):
            assert not copies
            return None
        self._last_step_id += 1
        added: list[AddedRequest] = []
        scheduled: list[ScheduledRequest] = []
        for part in draft.scheduled.values():
            scheduled.append(part.message())
            if part.added:
                tables = state.manager.block_ids(part.request.request_id)
                added.append(added_message(part.request, tables, state.eos_token_ids))
            self._advance(part)
        removed, state.removed = tuple(state.removed), []
        self._in_flight.append(InFlightStep(self._last_step_id, list(draft.scheduled.values())))
        return StepPlan(
            self._last_step_id,
            removed=removed,
            saves=saves,
            copies=copies,
            added=tuple(added),
            scheduled=tuple(scheduled),
            loads=tuple(draft.loads),
        )

    def _advance(self, part: ScheduledPart) -> None:
        request = part.request
        request.num_computed_tokens += part.num_new_tokens
        request.num_placeholders += part.sample
        part.handle = request.handle
        part.end_token = request.num_computed_tokens
        size = self._state.kv_config.hash_block_size
        if part.end_token // size > (part.end_token - part.num_new_tokens) // size:
            part.tables = self._state.manager.block_ids(request.request_id)

    def apply(self, result: StepResult, *, now_s: float) -> list[Output]:
        """New tokens and ends. A result that is not the oldest step in flight is dropped, counted."""
        state = self._state
        if not self._in_flight or self._in_flight[0].step_id != result.step_id:
            state.counters.stale_results += 1
            return []
        step = self._in_flight.popleft()
        state.counters.saves_dropped += result.num_saves_dropped
        state.connector.saves_ended(result.num_saves_dropped)
        self._measure(step, result.model_time_s)
        tokens = dict(zip(unpack_ids(result.handles), unpack_ids(result.token_ids), strict=True))
        rows = {item.handle: item for item in result.logprobs}
        outputs = []
        for part in step.parts:
            if part.request.finished:
                continue
            token_id = tokens.get(part.handle) if part.sample else None
            output = self._apply_token(part, token_id, now_s) if token_id is not None else None
            if part.request.logprobs is not None:
                self._keep_logprobs(part, rows.get(part.handle), output)
            self._confirm(part, now_s)
            if output is not None:
                outputs.append(output)
                if output.finish_reason is not None:
                    state.end(part.request, output.finish_reason)
        return outputs

    def _apply_token(self, part: ScheduledPart, token_id: int, now_s: float) -> Output:
        request = part.request
        request.num_placeholders -= 1
        request.append_output(token_id)
        request.first_token_s = request.first_token_s or now_s
        reason, stop_token_id = end_of(
            request, token_id, self._state.eos_token_ids, self._state.config.max_model_len
        )
        return Output(request, request.num_output_tokens - 1, [token_id], reason, stop_token_id)

    def _keep_logprobs(
        self, part: ScheduledPart, rows: RequestLogprobs | None, output: Output | None
    ) -> None:
        """`rows`: of this step. The prompt's are handed out with the first token, as a whole."""
        kept = part.request.logprobs
        assert kept is not None
        if rows is not None and rows.prompt:
            kept.add_prompt(part.end_token - part.num_new_tokens, rows.prompt)
        if output is None:
            return
        if rows is not None:
            kept.add_output(rows.output)
            output.logprobs = rows.output
        if output.first_index == 0:
            output.prompt_logprobs = bytes(kept.prompt)

    def _confirm(self, part: ScheduledPart, now_s: float) -> None:
        """The step's tokens are computed: full blocks get a hash that waited for its last token, and
        are offered to the store."""
        request = part.request
        if request.handle != part.handle:
            return  # preempted since: its blocks are gone
        if request.pin and part.end_token >= request.num_prompt_tokens:
            self._pin(request, now_s)
        if part.tables:
            self._state.manager.cache_blocks(request, min(part.end_token, request.num_tokens))
            self._state.connector.offer(request, part.end_token, part.tables)

    def _pin(self, request: Request, now_s: float) -> None:
        """Once per request. Past `max_pinned_blocks` it is refused, which the manager counts."""
        request.pin = False
        expires_at = now_s + request.pin_ttl_s if request.pin_ttl_s else None
        self._state.manager.pin_prefix(request, expires_at=expires_at)

    def _measure(self, step: InFlightStep, model_time_s: float) -> None:
        """What it takes to compute prompts."""
        counts = [part.num_new_tokens for part in step.parts]
        if counts and max(counts) > 1:
            self._state.connector.cost.measure_step(sum(counts), model_time_s)
