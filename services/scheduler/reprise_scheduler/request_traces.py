"""Where a traced request's time goes in this engine: queue, plan, wire, model.

The worker makes no spans: a plan's way to it and back is timed here, and a result brings the time that
the model took. Plans run one after another, so a step's turn begins when its plan was sent or when the
result before it came, whichever is later; `model` is the model's part of the turn and `wire` the rest:
encoding after the send, sockets, the worker's preparation, decoding. With plans made ahead, `plan` runs
beside the model of the step before.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from reprise_core.requests import FinishReason
from reprise_core.steps import StepPlan, StepResult
from reprise_runtime.tracing import (
    BUSY_S,
    ON_BEHALF,
    Attributes,
    Phase,
    Tracing,
    around,
    nothing,
    to_epoch_ns,
)
from reprise_scheduler.sched.outputs import Output
from reprise_scheduler.sched.request import Request


@dataclass(slots=True)
class _Work:
    """Many small pieces of one phase. Times of `time.monotonic`."""

    begun_s: float = 0.0
    ended_s: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0

    def add(self, start_s: float, end_s: float) -> None:
        self.begun_s = self.begun_s or start_s
        self.ended_s = end_s
        self.busy_s += end_s - start_s
        self.num_steps += 1


@dataclass(slots=True, eq=False)
class _Trace:
    """One request. Its size does not grow with the number of steps."""

    request: Request
    span: Span
    plan: _Work = field(default_factory=_Work)
    wire: _Work = field(default_factory=_Work)
    model: _Work = field(default_factory=_Work)


@dataclass(slots=True)
class _Flight:
    """A plan that was sent, with the traced requests in it."""

    step_id: int
    sent_s: float
    traces: list[_Trace]


class RequestTraces:
    """`active` is False while no traced request is here: the step path asks for nothing else then."""

    def __init__(self, tracing: Tracing, *, engine_id: str, clock: Callable[[], float]) -> None:
        self._tracing = tracing
        self._engine_id = engine_id
        self._clock = clock
        self._open: dict[int, _Trace] = {}
        """By the request's sequence; no more than the admitted requests."""
        self._flights: deque[_Flight] = deque()
        self._received_s = 0.0
        self.active = False

    # -- requests -----------------------------------------------------------------------------

    def begin(self, request: Request, traceparent: str) -> None:
        span = self._tracing.continued(
            traceparent,
            "engine",
            start_s=request.arrival_s,
            attributes={"reprise.engine_id": self._engine_id},
        )
        if span is not None:
            self._open[request.sequence] = _Trace(request, span)
            self.active = True

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Idempotent; nothing for a request that is not traced."""
        trace = self._open.pop(request.sequence, None)
        if trace is None:
            return
        now_s = self._clock()
        scheduled_s = request.first_scheduled_s
        end_s = scheduled_s if scheduled_s is not None else now_s
        self._record(trace, Phase.QUEUE, request.arrival_s, end_s, {})
        for phase, work in ((Phase.PLAN, trace.plan), (Phase.WIRE, trace.wire), (Phase.MODEL, trace.model)):
            if work.num_steps:
                facts: dict[str, str | bool | int | float] = {
                    BUSY_S: work.busy_s,
                    "reprise.num_steps": work.num_steps,
                }
                if phase is Phase.MODEL:
                    facts[ON_BEHALF] = "worker"
                self._record(trace, phase, work.begun_s, work.ended_s, facts)
        trace.span.set_attributes(_facts(request, reason))
        trace.span.end(to_epoch_ns(now_s))
        self.active = bool(self._open)
        if not self.active:
            self._flights.clear()

    def finished(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self.finish(output.request, output.finish_reason)

    def looking_up(self, request: Request) -> AbstractContextManager[None]:
        """Around a call to the store for this request."""
        trace = self._open.get(request.sequence)
        return nothing() if trace is None else self._tracing.span("store look-up", within=trace.span)

    def hashing(self, traceparent: str) -> AbstractContextManager[None]:
        """Around a call to the tokenizer, for a prompt that came without hashes of this engine."""
        span = self._tracing.continued(traceparent, "hash in the engine", phase=Phase.TOKENIZE)
        return nothing() if span is None else around(span)

    def _record(
        self, trace: _Trace, phase: Phase, start_s: float, end_s: float, attributes: Attributes
    ) -> None:
        self._tracing.record(
            phase.value, parent=trace.span, start_s=start_s, end_s=end_s, phase=phase, attributes=attributes
        )

    # -- steps, only while active -----------------------------------------------------------------

    def sent(self, plan: StepPlan, planning_s: float) -> None:
        """A plan that was begun at `planning_s` has just been given to the socket."""
        now_s = self._clock()
        handles = {item.handle for item in plan.scheduled}
        traces = [trace for trace in self._open.values() if trace.request.handle in handles]
        for trace in traces:
            trace.plan.add(planning_s, now_s)
        if traces:
            self._flights.append(_Flight(plan.step_id, now_s, traces))

    def received(self, result: StepResult, received_s: float) -> None:
        before_s, self._received_s = self._received_s, received_s
        while self._flights and self._flights[0].step_id < result.step_id:
            self._flights.popleft()
        if not self._flights or self._flights[0].step_id != result.step_id:
            return
        flight = self._flights.popleft()
        turn_s = max(flight.sent_s, before_s)
        model_start_s = max(turn_s, received_s - result.model_time_s)
        for trace in flight.traces:
            trace.wire.add(turn_s, model_start_s)
            trace.model.add(model_start_s, received_s)

    def lost_worker(self) -> None:
        """Steps in flight bring no result, and the next session counts anew."""
        self._flights.clear()


def _facts(request: Request, reason: FinishReason) -> dict[str, str | bool | int | float]:
    facts: dict[str, str | bool | int | float] = {
        "reprise.finish_reason": reason.value,
        "reprise.prompt_tokens": request.num_prompt_tokens,
        "reprise.output_tokens": request.num_output_tokens,
        "reprise.num_preemptions": request.num_preemptions,
    }
    sources = request.prompt_sources
    if sources is not None:
        for tier in ("device", "host", "disk", "external"):
            facts[f"reprise.cached_tokens.{tier}"] = getattr(sources, tier)
    return facts
