"""The gateway's spans of a request: HTTP, tokenize + hash, detokenize."""

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from opentelemetry.trace import Span, SpanKind
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprise_gateway.ports import TextStream, TextStreamApi
from reprise_gateway.sequence import Sequence
from reprise_runtime.tracing import (
    BUSY_S,
    HEADER,
    Phase,
    Tracing,
    around,
    current_span,
    from_traceparent,
    traceparent_of,
)
from reprise_wire.clients.tokenizer import DetokenizeUpdate, TextDelta

_TRACED = frozenset({"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})
_HEADER = HEADER.encode()


@dataclass(slots=True)
class _TextTime:
    """When the tokenizer had tokens of one sequence whose text was not back. Times of `time.monotonic`."""

    parent: Span
    begun_s: float = 0.0
    since_s: float = 0.0
    ended_s: float = 0.0
    busy_s: float = 0.0
    num_outstanding: int = 0
    num_updates: int = 0

    def sent(self, now_s: float) -> None:
        self.begun_s = self.begun_s or now_s
        if not self.num_outstanding:
            self.since_s = now_s
        self.num_outstanding += 1
        self.num_updates += 1

    def back(self, now_s: float) -> None:
        if not self.num_outstanding:
            return
        self.num_outstanding -= 1
        if not self.num_outstanding:
            self.busy_s += now_s - self.since_s
        self.ended_s = now_s


class RequestTraces:
    """Where tracing is off every method returns at once, and nothing is put around anything.

    Limit: one record per admitted sequence of a traced request.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._texts: dict[str, _TextTime] = {}

    # -- HTTP -----------------------------------------------------------------------------------

    def around_http(self, app: ASGIApp) -> ASGIApp:
        """The app with a span around each request, which goes on the client's trace or begins one."""
        return _TracedHttp(app, self._tracing) if self._tracing.enabled else app

    def tokenizing(self) -> AbstractContextManager[None]:
        return self._tracing.span(Phase.TOKENIZE.value, phase=Phase.TOKENIZE)

    def traceparent(self) -> str:
        """What an engine is given, so that its spans are below this request's."""
        return traceparent_of(current_span()) if self._tracing.enabled else ""

    # -- detokenizing -----------------------------------------------------------------------------

    def begin(self, sequences: Iterable[Sequence]) -> None:
        parent = current_span() if self._tracing.enabled else None
        if parent is not None:
            for sequence in sequences:
                self._texts[sequence.request_id] = _TextTime(parent)

    def end(self, sequences: Iterable[Sequence]) -> None:
        """However the request ended. Called once or more for each `begin`."""
        if not self._texts:
            return
        for sequence in sequences:
            text = self._texts.pop(sequence.request_id, None)
            if text is not None and text.num_updates:
                self._tracing.record(
                    Phase.DETOKENIZE.value,
                    parent=text.parent,
                    start_s=text.begun_s,
                    end_s=text.ended_s or time.monotonic(),
                    phase=Phase.DETOKENIZE,
                    attributes={BUSY_S: text.busy_s, "reprise.num_updates": text.num_updates},
                )

    def watch_text(self, api: TextStreamApi) -> TextStreamApi:
        """The same way to the tokenizer, with an eye on how long texts take."""
        return _WatchedTextApi(api, self._texts) if self._tracing.enabled else api


class _TracedHttp:
    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _TRACED:
            await self._app(scope, receive, send)
            return
        header = dict(scope["headers"]).get(_HEADER, b"").decode("latin-1")
        span = self._tracing.start(
            f"HTTP {scope['method']} {scope['path']}",
            parent=from_traceparent(header),
            kind=SpanKind.SERVER,
            phase=Phase.HTTP,
            attributes={"http.request.method": scope["method"], "http.route": scope["path"]},
        )

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        with around(span):
            await self._app(scope, receive, noting)


class _WatchedTextApi:
    def __init__(self, api: TextStreamApi, texts: dict[str, _TextTime]) -> None:
        self._api = api
        self._texts = texts

    async def text_stream(self, *, timeout_s: float) -> TextStream:
        stream = await self._api.text_stream(timeout_s=timeout_s)
        for text in self._texts.values():
            text.num_outstanding = 0  # an answer that a broken stream owed never comes
        return _WatchedText(stream, self._texts)


class _WatchedText:
    def __init__(self, stream: TextStream, texts: dict[str, _TextTime]) -> None:
        self._stream = stream
        self._texts = texts

    async def write(self, updates: Iterable[DetokenizeUpdate]) -> None:
        updates = list(updates)
        if self._texts:
            now_s = time.monotonic()
            for update in updates:
                text = self._texts.get(update.request_id)
                if text is not None:
                    text.sent(now_s)
        await self._stream.write(updates)

    async def read(self) -> list[TextDelta] | None:
        deltas = await self._stream.read()
        if self._texts and deltas:
            now_s = time.monotonic()
            for delta in deltas:
                text = self._texts.get(delta.request_id)
                if text is not None:
                    text.back(now_s)
        return deltas

    def cancel(self) -> None:
        self._stream.cancel()
