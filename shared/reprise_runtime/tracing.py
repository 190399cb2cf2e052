"""Spans of a request through the services: W3C `traceparent` in, spans out, only when asked for.

A span tells where time went, never what was said: no prompt, no text, no token ids. A span that
belongs to one of the phases of a request (`Phase`) carries its name as an attribute; one that sums many
small pieces of work (planning, detokenizing) runs from the first to the last of them and carries their
sum as `reprise.busy_s`.

Off is the absence of work: no interceptors, no threads, and `Tracing.span` gives the same empty context
each time. The current span travels in a context variable, from the HTTP handler to the calls it makes.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from types import TracebackType
from typing import Any

import grpc
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry
from pydantic import field_validator

from reprise_runtime.settings import ServiceSettings

HEADER = "traceparent"
PHASE = "reprise.phase"
BUSY_S = "reprise.busy_s"
ON_BEHALF = "reprise.service"
"""The service whose time a span shows, where that is not the one that made it."""
Attributes = Mapping[str, str | bool | int | float]
_PROPAGATOR = TraceContextTextMapPropagator()
_NOTHING: AbstractContextManager[None] = nullcontext()


class Phase(Enum):
    """What a request's time is divided into, in the order of its life."""

    HTTP = "HTTP"
    TOKENIZE = "tokenize + hash"
    QUEUE = "queue"
    PLAN = "plan"
    WIRE = "wire"
    MODEL = "model"
    DETOKENIZE = "detokenize"


class TracedSettings(ServiceSettings):
    """Settings of a service that a request passes through."""

    trace_exporter: str = ""
    """Where spans go: empty = nowhere, `file:PATH` = JSON lines appended to it, `otlp:URL` = an
    OpenTelemetry collector (OTLP over HTTP, such as otlp:http://127.0.0.1:4318)."""

    @field_validator("trace_exporter")
    @classmethod
    def _known_exporter(cls, value: str) -> str:
        kind, _, target = value.partition(":")
        if not value or (kind == "file" and target):
            return value
        if kind == "otlp" and target.startswith(("http://", "https://")):
            return value
        raise ValueError(f"{value!r}, must be empty, file:PATH, or otlp:http://HOST:PORT")


class Tracing:
    """The spans of one service. Times are those of `time.monotonic`."""

    def __init__(
        self, exporter: str = "", service: str = "", registry: CollectorRegistry | None = None
    ) -> None:
        """Raises OSError when the exporter's file cannot be opened."""
        self.enabled = bool(exporter)
        self._provider: Any = None
        self._tracer: trace.Tracer = trace.NoOpTracer()
        if exporter:
            from reprise_runtime.span_export import make_provider

            self._provider = make_provider(exporter, service, registry or CollectorRegistry())
            self._tracer = self._provider.get_tracer("reprise")

    def close(self) -> None:
        """Gives out what is queued, for a second at most."""
        if self._provider is not None:
            self._provider.shutdown()

    # -- making spans ---------------------------------------------------------------------------

    def start(
        self,
        name: str,
        *,
        parent: Context | None,
        kind: SpanKind = SpanKind.INTERNAL,
        phase: Phase | None = None,
        start_s: float | None = None,
        attributes: Attributes | None = None,
    ) -> Span:
        """A span that the caller ends; `parent` None = the current one. Not sampled: it records nothing."""
        return self._tracer.start_span(
            name,
            parent,
            kind,
            attributes=_with_phase(attributes, phase),
            start_time=to_epoch_ns(start_s) if start_s is not None else None,
        )

    def record(
        self,
        name: str,
        *,
        parent: Span,
        start_s: float,
        end_s: float,
        phase: Phase | None = None,
        attributes: Attributes | None = None,
    ) -> None:
        """A span of the past."""
        above = trace.set_span_in_context(parent)
        span = self.start(name, parent=above, phase=phase, start_s=start_s, attributes=attributes)
        span.end(to_epoch_ns(end_s))

    def span(
        self, name: str, *, phase: Phase | None = None, within: Span | None = None
    ) -> AbstractContextManager[None]:
        """A span around a block of code, below `within` or the current one; nothing where there is none."""
        above = within or (trace.get_current_span() if self.enabled else None)
        if above is None or not above.is_recording():
            return _NOTHING
        return _Around(self.start(name, parent=trace.set_span_in_context(above), phase=phase))

    def continued(self, traceparent: str, name: str, **more: Any) -> Span | None:
        """A span below the caller's; None when the caller does not trace this request."""
        if not self.enabled or not traceparent:
            return None
        span = self.start(name, parent=from_traceparent(traceparent), **more)
        return span if span.is_recording() else None


class _Around(AbstractContextManager[None]):
    """The span is the current one inside. A failure is marked by its type: a message may quote input."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> None:
        self._token = contexts.attach(trace.set_span_in_context(self._span))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        contexts.detach(self._token)
        if kind is not None:
            self._span.set_status(Status(StatusCode.ERROR, kind.__name__))
        self._span.end()


def nothing() -> AbstractContextManager[None]:
    """In place of a span that nobody asked for."""
    return _NOTHING


def around(span: Span) -> AbstractContextManager[None]:
    """Makes the span the current one, and ends it."""
    return _Around(span)


def current_span() -> Span | None:
    """The current span, where one is being recorded."""
    span = trace.get_current_span()
    return span if span.is_recording() else None


def traceparent_of(span: Span | None) -> str:
    """The header that continues this span; empty for None."""
    if span is None:
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier.get(HEADER, "")


def from_traceparent(traceparent: str) -> Context:
    """An empty context when the header is not well formed, as the standard wants it: a new trace."""
    return _PROPAGATOR.extract({HEADER: traceparent}, Context())


def to_epoch_ns(monotonic_s: float) -> int:
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)


def _with_phase(attributes: Attributes | None, phase: Phase | None) -> dict[str, Any]:
    return {**(attributes or {}), **({PHASE: phase.value} if phase is not None else {})}


# -- gRPC -------------------------------------------------------------------------------------------


class ClientTracing(grpc.aio.UnaryUnaryClientInterceptor):
    """Sends the current span's `traceparent` with a unary call."""

    async def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Awaitable[Any]], client_call_details: Any, request: Any
    ) -> Any:
        traceparent = traceparent_of(current_span())
        if traceparent:
            metadata = grpc.aio.Metadata(*(client_call_details.metadata or ()))
            metadata.add(HEADER, traceparent)
            client_call_details = client_call_details._replace(metadata=metadata)
        return await continuation(client_call_details, request)


class ServerTracing(grpc.aio.ServerInterceptor):
    """A span for each unary call that comes with a `traceparent`; other calls are left alone."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        if handler is None or HEADER not in metadata or not handler.unary_unary:
            return handler
        name = handler_call_details.method.lstrip("/")
        behaviour = handler.unary_unary

        async def traced(request: Any, context: Any) -> Any:
            span = self._tracing.continued(str(metadata[HEADER]), name, kind=SpanKind.SERVER)
            if span is None:
                return await behaviour(request, context)
            with around(span):
                return await behaviour(request, context)

        return grpc.unary_unary_rpc_method_handler(
            traced, handler.request_deserializer, handler.response_serializer
        )
