"""Spans: off is nothing, contexts travel as `traceparent`, exporters are bounded."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import get_current_span
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from reprise_gateway.settings import GatewaySettings
from reprise_runtime.span_export import BoundedExport, FileExporter, make_provider
from reprise_runtime.span_file import SpanRecord, read_trace
from reprise_runtime.tracing import (
    PHASE,
    Phase,
    Tracing,
    around,
    current_span,
    from_traceparent,
    nothing,
    traceparent_of,
)

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


@pytest.fixture
def tracing(tmp_path: Path):
    made = Tracing(f"file:{tmp_path}/spans.jsonl", "gateway", CollectorRegistry())
    yield made
    made.close()


def spans(tracing: Tracing, folder: Path, trace_id: str = TRACE_ID) -> list[SpanRecord]:
    tracing.close()
    return read_trace(folder, trace_id)


# -- off ----------------------------------------------------------------------------------------------


def test_off_makes_no_spans_threads_or_metrics() -> None:
    registry = CollectorRegistry()
    num_threads = threading.active_count()
    tracing = Tracing("", "gateway", registry)
    assert tracing.span("anything") is tracing.span("else") is nothing()
    assert tracing.continued(CALLER, "engine") is None
    with tracing.span("anything", phase=Phase.QUEUE):
        assert current_span() is None
    assert threading.active_count() == num_threads
    assert not list(registry.collect())
    tracing.close()


def test_off_does_not_load_the_sdk() -> None:
    # Not the store: its Redis client loads whatever of OpenTelemetry is installed.
    program = (
        "import sys, reprise_gateway.app, reprise_scheduler.app, reprise_tokenizer.app;"
        "from reprise_runtime.tracing import Tracing; Tracing();"
        "sys.exit('opentelemetry.sdk' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# -- context ------------------------------------------------------------------------------------------


def test_a_trace_goes_on_from_service_to_service(tracing: Tracing, tmp_path: Path) -> None:
    with around(tracing.start("HTTP", parent=from_traceparent(CALLER), phase=Phase.HTTP)):
        with tracing.span("tokenize + hash", phase=Phase.TOKENIZE):
            header = traceparent_of(current_span())
        other = tracing.continued(header, "in the tokenizer")
        assert other is not None
        other.end()
    assert header.startswith(f"00-{TRACE_ID}-")
    by_name = {span.name: span for span in spans(tracing, tmp_path)}
    assert by_name["HTTP"].parent_id == "00f067aa0ba902b7"
    assert by_name["HTTP"].attributes[PHASE] == "HTTP"
    assert by_name["tokenize + hash"].parent_id == by_name["HTTP"].span_id
    assert by_name["in the tokenizer"].parent_id == by_name["tokenize + hash"].span_id


async def test_a_task_begun_inside_is_below_the_span(tracing: Tracing) -> None:
    async def inner() -> str:
        return traceparent_of(current_span())

    with around(tracing.start("HTTP", parent=from_traceparent(CALLER))):
        task = asyncio.ensure_future(inner())
        assert (await task).startswith(f"00-{TRACE_ID}-")
    assert current_span() is None


@pytest.mark.parametrize(
    "header", ["", "nonsense", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", CALLER.replace("00-", "ff-", 1)]
)
def test_a_malformed_header_begins_a_new_trace(tracing: Tracing, header: str) -> None:
    span = tracing.start("HTTP", parent=from_traceparent(header))
    made = traceparent_of(span)
    assert len(made) == len(CALLER)
    assert TRACE_ID not in made
    assert span.parent is None
    span.end()


def test_a_caller_that_says_not_sampled_is_obeyed(tracing: Tracing, tmp_path: Path) -> None:
    unsampled = CALLER[:-2] + "00"
    with around(tracing.start("HTTP", parent=from_traceparent(unsampled))):
        assert current_span() is None
        assert tracing.span("tokenize + hash") is nothing()
    assert tracing.continued(unsampled, "engine") is None
    assert spans(tracing, tmp_path) == []


def test_a_failure_is_marked_without_its_words(tracing: Tracing, tmp_path: Path) -> None:
    span = tracing.start("HTTP", parent=from_traceparent(CALLER))
    with pytest.raises(ValueError, match="my secret prompt"), around(span):
        raise ValueError("my secret prompt")
    assert get_current_span() is not span
    assert [one.failed for one in spans(tracing, tmp_path)] == [True]
    assert "secret" not in (tmp_path / "spans.jsonl").read_text()


# -- limits -------------------------------------------------------------------------------------------


class HeldExporter(SpanExporter):
    """Stands still until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.num_spans = 0

    def export(self, batch):
        self.begun.set()
        self.go_on.wait(10)
        self.num_spans += len(batch)
        return SpanExportResult.SUCCESS


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    exporter = HeldExporter()
    export = BoundedExport(exporter, "gateway", registry, linger_s=0.0, queue_spans=3)
    provider = make_provider(f"file:{tmp_path}/other.jsonl", "gateway", CollectorRegistry())
    provider.add_span_processor(export)
    tracer = provider.get_tracer("test")
    tracer.start_span("first").end()
    assert exporter.begun.wait(10)
    for _ in range(5):  # three find room
        tracer.start_span("one more").end()
    exporter.go_on.set()
    provider.shutdown()
    assert exporter.num_spans == 4
    assert registry.get_sample_value("reprise_gateway_trace_dropped_spans_total") == 2
    assert registry.get_sample_value("reprise_gateway_trace_exported_spans_total") == 4


def test_a_file_at_its_limit_takes_no_more(tmp_path: Path) -> None:
    provider = make_provider(f"file:{tmp_path}/other.jsonl", "gateway", CollectorRegistry())
    span = provider.get_tracer("test").start_span("one")
    span.end()
    exporter = FileExporter(tmp_path / "small.jsonl", max_bytes=400)
    results = [exporter.export([span]) for _ in range(3)]
    exporter.shutdown()
    provider.shutdown()
    assert results == [SpanExportResult.SUCCESS, SpanExportResult.FAILURE, SpanExportResult.FAILURE]
    assert len((tmp_path / "small.jsonl").read_bytes().splitlines()) == 1


def test_a_line_that_is_cut_short_is_passed_over(tracing: Tracing, tmp_path: Path) -> None:
    tracing.start("HTTP", parent=from_traceparent(CALLER)).end()
    assert len(spans(tracing, tmp_path)) == 1
    with (tmp_path / "spans.jsonl").open("a") as file:
        file.write(f'{{"trace_id":"{TRACE_ID}","span_id":"ab')
    assert len(read_trace(tmp_path, TRACE_ID)) == 1


# -- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", "file:/tmp/x.jsonl", "otlp:http://127.0.0.1:4318"])
def test_exporters_that_are_known(value: str) -> None:
    assert GatewaySettings(trace_exporter=value).trace_exporter == value


@pytest.mark.parametrize("value", ["file:", "otlp:127.0.0.1:4318", "jaeger:http://x", "yes"])
def test_an_unknown_exporter_is_refused_by_name(value: str) -> None:
    with pytest.raises(ValidationError, match=r"trace_exporter\n.*must be empty, file:PATH, or otlp:"):
        GatewaySettings(trace_exporter=value)
