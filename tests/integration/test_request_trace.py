"""One request through gateway, tokenizer and scheduler with a simulated worker: its spans form one tree."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from reprise_cli.trace import breakdown, trace
from reprise_core.steps import StepPlan, StepResult
from reprise_runtime.span_file import SpanRecord, read_trace
from reprise_runtime.tracing import PHASE, Phase
from reprise_scheduler.app import SchedulerApp
from reprise_scheduler.settings import SchedulerSettings
from reprise_wire.step_codec import Hello
from support.fake_engine import FakeEngine
from support.gateway_system import GatewaySystem, gateway_system
from support.models import write_byte_level_model
from support.sim_worker import SimWorker
from support.valkey_server import free_port
from support.waiting import until
from support.zmq_worker import ZmqWorker

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
PROMPT = "The river there is quiet, said somebody."
STEP_S = 0.02


class _TimedSim(SimWorker):
    """Says that the model took most of the step."""

    def execute(self, plan: StepPlan) -> StepResult:
        return msgspec.structs.replace(super().execute(plan), model_time_s=STEP_S * 0.8)


class _Worker(ZmqWorker):
    """Takes the ids of the tests' tokenizer."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, step_delay_s=STEP_S, max_model_len=200)
        self.sim = _TimedSim(64, 4, self.sim.store)

    def _hello(self) -> Hello:
        hello = super()._hello()
        return msgspec.structs.replace(hello, model=msgspec.structs.replace(hello.model, vocab_size=400))


class SimEngine:
    """A whole scheduler and a simulated worker, in the place of a fake engine."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    async def start(self, address: str) -> None:
        workers = f"tcp://127.0.0.1:{free_port()}"
        self.app = SchedulerApp(
            SchedulerSettings(
                listen_address=address,
                workers_endpoint=workers,
                publisher_endpoint="",
                engine_id="engine-7",
                **self._settings,
            )
        )
        await self.app.start()
        self._worker = _Worker(workers).start()

    async def stop(self) -> None:
        self._worker.stop()
        await self.app.stop()


@asynccontextmanager
async def traced_system(folder: Path, **scheduler: Any) -> AsyncIterator[GatewaySystem]:
    engine = SimEngine(trace_exporter=f"file:{folder}/spans/scheduler.jsonl", **scheduler)
    async with gateway_system(
        write_byte_level_model(folder / "model"),
        [engine],
        trace_exporter=f"file:{folder}/spans/gateway.jsonl",
        tokenizer_settings={"trace_exporter": f"file:{folder}/spans/tokenizer.jsonl"},
    ) as system:
        yield system


async def complete(system: GatewaySystem, headers: dict[str, str] = HEADERS, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **fields}
    response = await system.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json() if not fields.get("stream") else {}


async def spans_of(folder: Path, num_spans: int) -> list[SpanRecord]:
    await until(lambda: len(read_trace(folder / "spans", TRACE_ID)) >= num_spans)
    return read_trace(folder / "spans", TRACE_ID)


def phases(spans: list[SpanRecord]) -> list[str]:
    return sorted(str(span.attributes[PHASE]) for span in spans if PHASE in span.attributes)


def path_to(span: SpanRecord, spans: list[SpanRecord]) -> list[str]:
    by_id = {one.span_id: one for one in spans}
    above = by_id.get(span.parent_id or "")
    return [*(path_to(above, spans) if above else []), span.name]


# -- the tree -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_spans_of_a_request_are_one_tree(tmp_path: Path, stream: bool, ahead: bool) -> None:
    async with traced_system(tmp_path, async_scheduling=ahead) as system:
        answer = await complete(system, stream=stream)
        spans = await spans_of(tmp_path, 9)
    assert phases(spans) == sorted(phase.value for phase in Phase)
    http = "HTTP POST /v1/completions"
    assert sorted(path_to(span, spans) for span in spans) == sorted(
        [
            [http],
            [http, "tokenize + hash"],
            [http, "tokenize + hash", "reprise.v1.TokenizerService/Tokenize"],
            [http, "engine"],
            [http, "engine", "queue"],
            [http, "engine", "plan"],
            [http, "engine", "wire"],
            [http, "engine", "model"],
            [http, "detokenize"],
        ]
    )
    root = next(span for span in spans if span.name == http)
    assert root.parent_id == PARENT_ID
    assert root.attributes["http.response.status_code"] == 200
    for span in spans:  # one machine, one clock
        assert root.start_ns - 1e6 <= span.start_ns <= span.end_ns <= root.end_ns + 1e6, span
    named = {row.name: row for row in breakdown(spans)}
    assert named["model"].num_steps == named["wire"].num_steps == 6
    assert named["model"].duration_s == pytest.approx(6 * STEP_S * 0.8, rel=0.2)
    assert named["wire"].duration_s >= 6 * STEP_S * 0.15
    engine = next(span for span in spans if span.name == "engine")
    assert engine.attributes["reprise.engine_id"] == "engine-7"
    assert engine.attributes["reprise.output_tokens"] == 6
    if answer:
        assert engine.attributes["reprise.prompt_tokens"] == answer["usage"]["prompt_tokens"]


async def test_each_sequence_has_its_own_engine_spans(tmp_path: Path) -> None:
    async with traced_system(tmp_path) as system:
        await complete(system, n=2, temperature=1.0)
        spans = await spans_of(tmp_path, 15)
    assert phases(spans).count("model") == phases(spans).count("detokenize") == 2
    assert phases(spans).count("tokenize + hash") == phases(spans).count("HTTP") == 1


async def test_a_client_that_leaves_ends_the_spans(tmp_path: Path) -> None:
    async with traced_system(tmp_path) as system:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(STEP_S * 8):
                await complete(system, max_tokens=150)
        spans = await spans_of(tmp_path, 9)
        engine = next(span for span in spans if span.name == "engine")
        assert engine.attributes["reprise.finish_reason"] == "abort"
        assert not system.engines[0].app._loop._traces.active


async def test_no_text_of_a_request_is_in_its_spans(tmp_path: Path) -> None:
    async with traced_system(tmp_path) as system:
        answer = await complete(system)
        response = await system.http.post("/v1/completions", json={"prompt": PROMPT, "stop": PROMPT * 90})
        assert response.status_code == 400
        await spans_of(tmp_path, 9)
    written = "".join(path.read_text() for path in (tmp_path / "spans").iterdir())
    assert "quiet" not in written
    assert answer["choices"][0]["text"] not in written


async def test_the_command_sends_a_prompt_and_prints_its_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with traced_system(tmp_path) as system:
        code = await asyncio.to_thread(
            trace, str(system.http.base_url), trace_dir=tmp_path / "spans", prompt=PROMPT, max_tokens=3
        )
    printed = capsys.readouterr().out
    assert code == 0, printed
    for phase in Phase:
        assert phase.value in printed
    assert "(3 steps)" in printed


# -- who decides --------------------------------------------------------------------------------------


async def test_without_a_header_a_trace_begins_here(tmp_path: Path) -> None:
    async with traced_system(tmp_path) as system:
        await complete(system, headers={})
        file = tmp_path / "spans" / "gateway.jsonl"
        await until(lambda: b"HTTP" in file.read_bytes())
        root = next(
            span
            for span in map(msgspec.json.Decoder(SpanRecord).decode, file.read_bytes().splitlines())
            if span.attributes.get(PHASE) == "HTTP"
        )
        await until(lambda: len(read_trace(tmp_path / "spans", root.trace_id)) == 9)
    assert root.parent_id is None


async def test_not_sampled_by_the_client_means_no_spans_anywhere(tmp_path: Path) -> None:
    async with traced_system(tmp_path) as system:
        await complete(system, headers={"traceparent": HEADERS["traceparent"][:-2] + "00"})
    assert all(not path.read_bytes() for path in (tmp_path / "spans").iterdir())


async def test_off_sends_no_trace_context_on(tmp_path: Path) -> None:
    engine = FakeEngine(vocab_size=400, max_model_len=300, block_size=4)
    async with gateway_system(write_byte_level_model(tmp_path), [engine]) as system:
        await complete(system)
    assert [submit.traceparent for submit in engine.submits] == [""]


# -- a collector --------------------------------------------------------------------------------------


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Takes OTLP over HTTP."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def test_spans_go_to_a_collector(tmp_path: Path) -> None:
    engine = FakeEngine(vocab_size=400, max_model_len=300, block_size=4)
    with collector() as (url, received):
        async with gateway_system(
            write_byte_level_model(tmp_path), [engine], trace_exporter=f"otlp:{url}"
        ) as system:
            await complete(system)
        names = {
            (resource.resource.attributes[0].value.string_value, span.name, span.trace_id.hex())
            for request in received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }
    expected = {"HTTP POST /v1/completions", "tokenize + hash", "detokenize"}
    assert names == {("reprise-gateway", name, TRACE_ID) for name in expected}


async def test_a_collector_that_is_away_delays_nothing_and_is_counted(tmp_path: Path) -> None:
    engine = FakeEngine(vocab_size=400, max_model_len=300, block_size=4)
    async with gateway_system(
        write_byte_level_model(tmp_path), [engine], trace_exporter=f"otlp:http://127.0.0.1:{free_port()}"
    ) as system:
        for _ in range(5):
            await complete(system)
        assert system.metric("request_seconds_count") == 5
        await until(lambda: system.metric("trace_dropped_spans_total") == 15, timeout_s=20)
