"""Spans on their way out: a bounded queue and one thread that writes to a file or to a collector.

Imported only when tracing is asked for, so that a service without it does not load the SDK.
"""

import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id
from prometheus_client import CollectorRegistry, Counter

from reprise_runtime.span_file import SpanRecord

QUEUE_SPANS = 4096
"""Finished spans that wait for the exporter; one more is dropped and counted."""
BATCH_SPANS = 512
MAX_FILE_BYTES = 256 * 1024 * 1024
"""Size of a span file; what comes later is dropped and counted."""
COLLECTOR_TIMEOUT_S = 5.0
_COLLECTOR_LINGER_S = 0.5
"""How long the thread gathers spans before it sends them to a collector."""
_FLUSH_TIMEOUT_S = 1.0
"""How long a stopping service waits for the spans that are still queued."""


def make_provider(exporter: str, service: str, registry: CollectorRegistry) -> TracerProvider:
    """`exporter` as in the setting. Raises OSError when the file cannot be opened."""
    kind, _, target = exporter.partition(":")
    if kind == "file":
        processor = BoundedExport(FileExporter(Path(target)), service, registry, linger_s=0.0)
    else:
        # Here, because it is the only user of the HTTP client that it brings.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        collector = OTLPSpanExporter(f"{target.rstrip('/')}/v1/traces", timeout=COLLECTOR_TIMEOUT_S)
        processor = BoundedExport(collector, service, registry, linger_s=_COLLECTOR_LINGER_S)
    # A caller who says "not sampled" is obeyed; without a caller's word every request is traced.
    provider = TracerProvider(
        sampler=ParentBased(ALWAYS_ON),
        resource=Resource({"service.name": f"reprise-{service}"}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor)
    return provider


class BoundedExport(SpanProcessor):
    """Never waits for the exporter: a span that finds the queue full is dropped and counted."""

    def __init__(
        self,
        exporter: SpanExporter,
        service: str,
        registry: CollectorRegistry,
        *,
        linger_s: float,
        queue_spans: int = QUEUE_SPANS,
    ) -> None:
        prefix = f"reprise_{service}_trace_"
        self._exported = Counter(prefix + "exported_spans", "Spans given out", registry=registry)
        self._dropped = Counter(
            prefix + "dropped_spans",
            "Spans dropped because the queue or the file was full, or the collector away",
            registry=registry,
        )
        self._exporter = exporter
        self._linger_s = linger_s
        self._queue: queue.Queue[ReadableSpan | None] = queue.Queue(queue_spans)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self._dropped.inc()

    def shutdown(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        try:
            self._queue.put(None, timeout=_FLUSH_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(_FLUSH_TIMEOUT_S)

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            self._closing.wait(self._linger_s)
            batch = [first]
            ended = False
            while len(batch) < BATCH_SPANS and not self._queue.empty():
                span = self._queue.get()
                if span is None:
                    ended = True
                    break
                batch.append(span)
            self._export(batch)
            if ended:
                break
        self._exporter.shutdown()

    def _export(self, batch: Sequence[ReadableSpan]) -> None:
        done = self._exporter.export(batch) is SpanExportResult.SUCCESS
        (self._exported if done else self._dropped).inc(len(batch))


class FileExporter(SpanExporter):
    """Appends to one file, which only this process writes."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._max_bytes = max_bytes
        self._encoder = msgspec.json.Encoder()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        data = b"".join(self._encoder.encode(to_record(span)) + b"\n" for span in spans)
        try:
            if self._file.tell() + len(data) > self._max_bytes:
                return SpanExportResult.FAILURE
            self._file.write(data)
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def to_record(span: ReadableSpan) -> SpanRecord:
    assert span.start_time is not None
    assert span.end_time is not None
    name = str(span.resource.attributes["service.name"])
    return SpanRecord(
        trace_id=format_trace_id(span.context.trace_id),
        span_id=format_span_id(span.context.span_id),
        parent_id=format_span_id(span.parent.span_id) if span.parent is not None else None,
        service=name.removeprefix("reprise-"),
        name=span.name,
        start_ns=span.start_time,
        end_ns=span.end_time,
        failed=span.status.status_code is StatusCode.ERROR,
        attributes={
            key: value
            for key, value in (span.attributes or {}).items()
            if isinstance(value, str | bool | int | float)
        },
    )
