"""An engine's spans of one request: queue, plan, wire and model, from the moments that the loop tells."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from reprise_core.hash_chain import HashInputs
from reprise_core.ids import RequestId
from reprise_core.requests import FinishReason, SamplingParams
from reprise_core.steps import ScheduledRequest, StepPlan, StepResult
from reprise_runtime.span_file import SpanRecord, read_trace
from reprise_runtime.tracing import BUSY_S, PHASE, Tracing, current_span, traceparent_of
from reprise_scheduler.profile import make_profile
from reprise_scheduler.request_traces import RequestTraces
from reprise_scheduler.sched.request import Request
from reprise_scheduler.settings import HashAlgorithm

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


class Engine:
    """Moments in seconds, as the loop would name them."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.folder = folder
        self.tracing = Tracing(f"file:{folder}/scheduler.jsonl", "scheduler", CollectorRegistry())
        self.traces = RequestTraces(self.tracing, engine_id="engine-7", clock=lambda: self.now_s)
        self.hasher = make_profile(HashAlgorithm.SHA256, 4).hasher()

    def request(self, sequence: int, arrival_s: float) -> Request:
        return Request(
            request_id=RequestId(f"r-{sequence}"),
            owner=None,
            token_ids=[1, 2, 3],
            num_prompt_tokens=3,
            sampling=SamplingParams(max_tokens=4),
            chain=self.hasher.chain(HashInputs()),
            arrival_s=arrival_s,
            sequence=sequence,
        )

    def send(self, step_id: int, *handles: int, planning_s: float, sent_s: float) -> None:
        self.now_s = sent_s
        parts = tuple(ScheduledRequest(handle, 0, 1, (), True) for handle in handles)
        self.traces.sent(StepPlan(step_id, scheduled=parts), planning_s)

    def receive(self, step_id: int, *, received_s: float, model_s: float) -> None:
        self.traces.received(StepResult(step_id, b"", b"", model_s), received_s)

    def finish(self, request: Request, now_s: float) -> dict[str, SpanRecord]:
        self.now_s = now_s
        self.traces.finish(request, FinishReason.LENGTH)
        self.tracing.close()
        return {span.name: span for span in read_trace(self.folder, TRACE_ID)}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def busy(span: SpanRecord) -> float:
    return float(span.attributes[BUSY_S])


def test_a_request_that_waits_and_runs_two_steps(engine: Engine) -> None:
    request = engine.request(1, arrival_s=10.0)
    engine.traces.begin(request, CALLER)
    request.first_scheduled_s, request.handle = 12.0, 5
    engine.send(1, 5, planning_s=12.0, sent_s=12.1)
    engine.receive(1, received_s=13.0, model_s=0.7)
    engine.send(2, 5, planning_s=13.0, sent_s=13.2)
    engine.receive(2, received_s=14.2, model_s=0.9)
    spans = engine.finish(request, 14.3)
    assert {name: span.attributes.get(PHASE) for name, span in spans.items()} == {
        "engine": None,
        "queue": "queue",
        "plan": "plan",
        "wire": "wire",
        "model": "model",
    }
    top = spans["engine"]
    assert top.parent_id == "00f067aa0ba902b7"
    assert all(span.parent_id == top.span_id for span in spans.values() if span is not top)
    assert top.duration_s == pytest.approx(4.3, abs=1e-3)
    assert spans["queue"].duration_s == pytest.approx(2.0, abs=1e-3)
    assert busy(spans["plan"]) == pytest.approx(0.3)
    assert busy(spans["model"]) == pytest.approx(1.6)
    assert busy(spans["wire"]) == pytest.approx(0.3)
    assert spans["model"].attributes["reprise.service"] == "worker"
    assert spans["plan"].attributes["reprise.num_steps"] == 2
    assert top.attributes["reprise.engine_id"] == "engine-7"
    assert top.attributes["reprise.finish_reason"] == "length"
    assert not engine.traces.active


def test_a_plan_made_ahead_does_not_count_its_wait_as_wire(engine: Engine) -> None:
    request = engine.request(1, arrival_s=0.5)
    engine.traces.begin(request, CALLER)
    request.first_scheduled_s, request.handle = 1.0, 5
    engine.send(1, 5, planning_s=1.0, sent_s=1.1)
    engine.send(2, 5, planning_s=1.1, sent_s=1.2)  # while step 1 runs
    engine.receive(1, received_s=2.1, model_s=0.8)
    engine.receive(2, received_s=3.1, model_s=0.9)
    spans = engine.finish(request, 3.1)
    assert busy(spans["wire"]) == pytest.approx(0.2 + 0.1)
    assert busy(spans["model"]) == pytest.approx(0.8 + 0.9)


def test_steps_without_the_request_and_stale_results_are_not_its_own(engine: Engine) -> None:
    request = engine.request(1, arrival_s=1.0)
    engine.traces.begin(request, CALLER)
    engine.send(1, 8, 9, planning_s=1.0, sent_s=1.1)
    engine.receive(1, received_s=2.0, model_s=0.5)
    engine.receive(7, received_s=2.1, model_s=0.5)
    spans = engine.finish(request, 3.0)
    assert set(spans) == {"engine", "queue"}
    assert spans["queue"].duration_s == pytest.approx(2.0, abs=1e-3)


def test_a_lost_worker_takes_its_steps_along(engine: Engine) -> None:
    request = engine.request(1, arrival_s=1.0)
    engine.traces.begin(request, CALLER)
    request.first_scheduled_s, request.handle = 1.0, 5
    engine.send(1, 5, planning_s=1.0, sent_s=1.1)
    engine.traces.lost_worker()
    request.handle = 6
    engine.send(1, 6, planning_s=5.0, sent_s=5.1)
    engine.receive(1, received_s=6.0, model_s=0.5)
    spans = engine.finish(request, 6.0)
    assert busy(spans["model"]) == pytest.approx(0.5)
    assert spans["plan"].attributes["reprise.num_steps"] == 2
    assert spans["model"].attributes["reprise.num_steps"] == 1


@pytest.mark.parametrize("header", ["", CALLER[:-2] + "00"])
def test_a_request_that_nobody_traces_leaves_the_step_path_alone(engine: Engine, header: str) -> None:
    request = engine.request(1, arrival_s=1.0)
    engine.traces.begin(request, header)
    assert not engine.traces.active
    assert engine.finish(request, 2.0) == {}


def test_calls_to_other_services_carry_the_request_along(engine: Engine) -> None:
    request, other = engine.request(1, arrival_s=1.0), engine.request(2, arrival_s=1.0)
    with engine.traces.hashing(CALLER):
        hashing = traceparent_of(current_span())
    engine.traces.begin(request, CALLER)
    with engine.traces.looking_up(request):
        looking = traceparent_of(current_span())
    with engine.traces.looking_up(other), engine.traces.hashing(""):
        assert current_span() is None
    spans = engine.finish(request, 2.0)
    assert spans["hash in the engine"].span_id in hashing
    assert spans["hash in the engine"].attributes[PHASE] == "tokenize + hash"
    assert spans["store look-up"].span_id in looking
    assert spans["store look-up"].parent_id == spans["engine"].span_id
