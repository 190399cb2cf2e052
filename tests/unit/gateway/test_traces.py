"""How long the tokenizer had tokens of a sequence, and spans around HTTP requests."""

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from reprise_core.requests import SamplingParams
from reprise_gateway import traces as traces_module
from reprise_gateway.sequence import Sequence, Work
from reprise_gateway.traces import RequestTraces
from reprise_runtime.span_file import SpanRecord, read_trace
from reprise_runtime.tracing import BUSY_S, Tracing, around, from_traceparent
from reprise_wire.clients.tokenizer import DetokenizeOpen, DetokenizeUpdate, TextDelta

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
WORK = Work(
    model="m",
    prompt_ids=(1,),
    hashes={},
    sampling=SamplingParams(max_tokens=4),
    text=DetokenizeOpen(),
    eos_token_ids=frozenset(),
)


class EchoStream:
    """Answers each update with a piece of text, when asked."""

    def __init__(self) -> None:
        self._owed: deque[list[TextDelta]] = deque()

    async def text_stream(self, *, timeout_s: float) -> "EchoStream":
        return self

    async def write(self, updates: Iterable[DetokenizeUpdate]) -> None:
        self._owed.append([TextDelta(update.request_id, "x", 1, None, update.finish) for update in updates])

    async def read(self) -> list[TextDelta] | None:
        return self._owed.popleft()

    def cancel(self) -> None: ...


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(traces_module, "time", made)
    return made


def make(folder: Path) -> tuple[Tracing, RequestTraces]:
    tracing = Tracing(f"file:{folder}/gateway.jsonl", "gateway", CollectorRegistry())
    return tracing, RequestTraces(tracing)


def spans(tracing: Tracing, folder: Path) -> list[SpanRecord]:
    tracing.close()
    return read_trace(folder, TRACE_ID)


async def test_detokenizing_is_the_time_in_which_text_was_owed(tmp_path: Path, clock: Clock) -> None:
    tracing, traces = make(tmp_path)
    sequence = Sequence("r-1", WORK)
    with around(tracing.start("HTTP", parent=from_traceparent(CALLER))):
        traces.begin([sequence])
    stream = await traces.watch_text(EchoStream()).text_stream(timeout_s=1.0)

    async def at(now_s: float, work: Any) -> None:
        clock.now_s = now_s
        await work

    other, mine = DetokenizeUpdate("other", (1,)), DetokenizeUpdate("r-1", (1,))
    await at(101.0, stream.write([other, mine]))
    await at(101.5, stream.write([mine]))
    await at(102.0, stream.read())
    await at(102.25, stream.read())  # 1.25 s in which one or two answers were owed
    await at(105.0, stream.write([mine]))
    await at(105.5, stream.read())
    traces.end([sequence])
    traces.end([sequence])
    by_name = {span.name: span for span in spans(tracing, tmp_path)}
    detokenize = by_name["detokenize"]
    assert detokenize.attributes[BUSY_S] == pytest.approx(1.75)
    assert detokenize.attributes["reprise.num_updates"] == 3
    assert detokenize.duration_s == pytest.approx(4.5, abs=1e-3)
    assert detokenize.parent_id == by_name["HTTP"].span_id


async def test_a_broken_text_stream_owes_nothing(tmp_path: Path, clock: Clock) -> None:
    tracing, traces = make(tmp_path)
    sequence = Sequence("r-1", WORK)
    with around(tracing.start("HTTP", parent=from_traceparent(CALLER))):
        traces.begin([sequence])
    api = traces.watch_text(EchoStream())
    stream = await api.text_stream(timeout_s=1.0)
    await stream.write([DetokenizeUpdate("r-1", (1,))])
    clock.now_s = 500.0
    stream = await api.text_stream(timeout_s=1.0)
    await stream.write([DetokenizeUpdate("r-1", (1,))])
    await stream.read()
    clock.now_s = 501.0
    await stream.read()
    traces.end([sequence])
    found = next(span for span in spans(tracing, tmp_path) if span.name == "detokenize")
    assert found.attributes[BUSY_S] == pytest.approx(0.0)


async def test_off_puts_nothing_around_anything() -> None:
    traces = RequestTraces(Tracing())
    api = EchoStream()

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    assert traces.watch_text(api) is api
    assert traces.around_http(app) is app
    assert traces.traceparent() == ""
    traces.begin([Sequence("r-1", WORK)])
    assert not traces._texts


async def test_probes_and_other_paths_have_no_spans(tmp_path: Path) -> None:
    tracing, traces = make(tmp_path)
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(traces.traceparent())

    around_app = traces.around_http(app)
    for path in ("/metrics", "/v1/completions"):
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"traceparent", CALLER.encode())],
        }
        await around_app(scope, None, None)
    assert seen[0] == ""
    assert TRACE_ID in seen[1]
    assert [span.name for span in spans(tracing, tmp_path)] == ["HTTP POST /v1/completions"]
