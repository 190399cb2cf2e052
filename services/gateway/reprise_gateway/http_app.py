"""HTTP in: the routes. Decode, call, encode."""

import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from reprise_core.errors import RepriseError
from reprise_gateway import answers
from reprise_gateway.body import parse_body
from reprise_gateway.calls import (
    CallLimits,
    GenerationCall,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from reprise_gateway.completions import Completions, Deadline, Run
from reprise_gateway.errors import ApiError, bad_rule, bad_shape, from_reprise_error
from reprise_gateway.fleet_admin import FleetAdmin
from reprise_gateway.logprob_answers import ChoiceLogprobs
from reprise_gateway.metrics import GatewayMetrics
from reprise_gateway.responses import ClientGone, EventStream, error_response, json_response, unless_gone
from reprise_gateway.token_texts import TokenTexts
from reprise_runtime.logs import get_logger

ROUTES = frozenset({
    "/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/health", "/ping",
    "/version", "/load", "/metrics", "/reset_prefix_cache", "/pins",
})  # fmt: skip
_MAX_REQUEST_ID = 128
_TENANT_HEADER = "X-Tenant-Id"
_MAX_TENANT = 128
_TIMEOUT_HEADER = "X-Request-Timeout-S"
_MAX_TIMEOUT_S = 86_400
_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "off"})


class GatewayHttp:
    """The routes' handlers."""

    def __init__(
        self,
        completions: Completions,
        admin: FleetAdmin,
        *,
        metrics: GatewayMetrics,
        limits: CallLimits,
        max_body_bytes: int,
        version: str,
        problem: Callable[[], str | None],
        num_inflight: Callable[[], int],
        trust_tenant_header: bool = False,
    ) -> None:
        """`problem`: why requests cannot be served now, or None."""
        self._trust_tenant_header = trust_tenant_header
        self._completions = completions
        self._texts = TokenTexts(completions.prompts)
        self._admin = admin
        self._metrics = metrics
        self._limits = limits
        self._max_body_bytes = max_body_bytes
        self._version = version
        self._problem = problem
        self._num_inflight = num_inflight
        self._started_s = int(time.time())

    def make_app(self, *, dev_mode: bool) -> FastAPI:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        routes: list[tuple[str, str, Callable[..., Any]]] = [
            ("GET", "/v1/models", self.models),
            ("POST", "/v1/completions", self.complete),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/health", self.health),
            ("GET", "/ping", self.health),
            ("GET", "/version", self.version),
            ("GET", "/load", self.load),
            ("GET", "/metrics", self.metrics),
        ]
        if dev_mode:
            routes += [
                ("POST", "/reset_prefix_cache", self.reset),
                ("GET", "/pins", self.pins),
                ("DELETE", "/pins/{name}", self.unpin),
            ]
        for method, path, handler in routes:
            app.add_api_route(path, handler, methods=[method], response_model=None)
        app.add_exception_handler(ApiError, _on_api_error)
        app.add_exception_handler(RepriseError, _on_reprise_error)
        app.add_exception_handler(ClientGone, self._on_client_gone)
        app.add_exception_handler(Exception, _on_bug)
        return app

    # -- generation ---------------------------------------------------------------------------------

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, read_completion, "cmpl")

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, read_chat, "chatcmpl")

    async def _generate(
        self,
        request: Request,
        read: Callable[[dict[str, Any], CallLimits], GenerationCall],
        id_prefix: str,
    ) -> Response:
        started_s = time.monotonic()
        call = read(await self._body(request), self._limits)
        if self._trust_tenant_header:
            call = replace(call, tenant=_tenant(request))
        self._metrics.unknown_fields.inc(call.num_unknown_fields)
        request_id = f"{id_prefix}-{_caller_id(request) or uuid.uuid4().hex}"
        deadline = _deadline(request)
        run = await unless_gone(request, self._completions.prepare(call, request_id, deadline))
        self._completions.start(run)
        if call.stream:
            return await self._stream(request, run, started_s)
        try:
            return json_response(await unless_gone(request, self._collect(run, started_s)))
        finally:
            self._completions.end(run)

    async def _stream(self, request: Request, run: Run, started_s: float) -> Response:
        """Begins with the first news, so that a refusal by the engine still has its own HTTP status."""
        try:
            await unless_gone(request, run.sequences[0].begun())
        except BaseException:
            self._completions.end(run)
            raise
        return EventStream(
            self._events(run, started_s),
            on_gone=self._metrics.disconnects.inc,
            on_close=lambda: self._completions.end(run),
        )

    async def _collect(self, run: Run, started_s: float) -> answers.Json:
        texts: list[list[str]] = [[] for _ in run.sequences]
        ends: dict[int, answers.Answer] = {}
        async for i, update in self._completions.updates(run, started_s):
            texts[i].append(update.text)
            if update.finish_reason is not None:
                ends[i] = answers.Answer(
                    "".join(texts[i]), update.num_tokens, update.finish_reason, update.stop_reason
                )
        finished = []
        for i, logprobs in enumerate(self._logprobs(run)):
            shown, of_prompt = await logprobs.up_to(ends[i].num_tokens), await logprobs.of_prompt()
            finished.append(replace(ends[i], logprobs=shown, prompt_logprobs=of_prompt))
        return answers.plain(run, finished)

    def _logprobs(self, run: Run) -> list[ChoiceLogprobs]:
        return [ChoiceLogprobs(run, i, self._texts) for i in range(len(run.sequences))]

    async def _events(self, run: Run, started_s: float) -> AsyncIterator[answers.Json]:
        chunks, logprobs = answers.ChunkMaker(run), self._logprobs(run)
        for chunk in chunks.opening():
            yield chunk
        async for i, update in self._completions.updates(run, started_s):
            if chunks.shows(update):
                yield chunks.chunk(i, update, await logprobs[i].up_to(update.num_tokens))
        for chunk in chunks.closing():
            yield chunk

    # -- tokens -------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        call = read_tokenize(await self._body(request))
        served = await self._completions.fleet.served(call.model)
        tokenized = await self._completions.prompts.tokenize(
            call.prompt, add_special_tokens=call.add_special_tokens
        )
        return json_response(
            {
                "count": len(tokenized.token_ids),
                "max_model_len": served.info.max_model_len,
                "tokens": tokenized.token_ids,
                "token_strs": None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        call = read_detokenize(await self._body(request))
        await self._completions.fleet.served(call.model)
        return json_response({"prompt": await self._completions.prompts.detokenize(call.token_ids)})

    # -- the rest -----------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return json_response(answers.models(await self._completions.fleet.known_infos(), self._started_s))

    async def health(self, request: Request) -> Response:
        problem = self._problem()
        if problem is not None:
            raise ApiError(503, problem, retry_after_s=1.0)
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        return json_response({"version": self._version})

    async def load(self, request: Request) -> Response:
        return json_response({"server_load": self._num_inflight()})

    async def metrics(self, request: Request) -> Response:
        return Response(await self._admin.metrics(), media_type=CONTENT_TYPE_LATEST)

    async def reset(self, request: Request) -> Response:
        return json_response(
            await self._admin.reset(
                reset_running_requests=_query_flag(request, "reset_running_requests"),
                reset_external=_query_flag(request, "reset_external"),
            )
        )

    async def pins(self, request: Request) -> Response:
        return json_response(await self._admin.pins())

    async def unpin(self, request: Request) -> Response:
        await self._admin.unpin(request.path_params["name"])
        return Response(status_code=204)

    async def _body(self, request: Request) -> dict[str, Any]:
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_body_bytes:
            raise self._too_large(f"{length} bytes")
        raw = bytearray()
        async for piece in request.stream():
            raw += piece
            if len(raw) > self._max_body_bytes:
                raise self._too_large("more than that")
        return parse_body(bytes(raw), request.headers.get("content-type", ""))

    def _too_large(self, size: str) -> ApiError:
        self._metrics.refused_requests.labels("body_bytes").inc()
        return ApiError(413, f"body: {size}, at most {self._max_body_bytes} bytes are allowed")

    async def _on_client_gone(self, request: Request, error: Exception) -> Response:
        self._metrics.disconnects.inc()
        return Response(status_code=499)


def _caller_id(request: Request) -> str | None:
    """The caller's own id, when it is one that can stand in a header and a log."""
    value: str | None = request.headers.get("x-request-id")
    if value and len(value) <= _MAX_REQUEST_ID and value.isascii() and value.isprintable():
        return value
    return None


def _deadline(request: Request) -> Deadline | None:
    """From the caller's X-Request-Timeout-S: seconds from now in which it wants all of the answer."""
    text = request.headers.get(_TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise bad_rule(
            _TIMEOUT_HEADER,
            f"{_TIMEOUT_HEADER}: {text!r:.60}, must be a number of seconds above 0 and at most"
            f" {_MAX_TIMEOUT_S}",
        )
    return Deadline(timeout_s, time.monotonic() + timeout_s)


def _tenant(request: Request) -> str:
    """From the X-Tenant-Id that whoever stands before us has set; empty = none."""
    tenant: str = request.headers.get(_TENANT_HEADER, "")
    if len(tenant) > _MAX_TENANT or not tenant.isascii() or not tenant.isprintable():
        raise bad_rule(
            _TENANT_HEADER,
            f"{_TENANT_HEADER}: {tenant!r:.60}, must be at most {_MAX_TENANT} printable ASCII characters",
        )
    return tenant


def _query_flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false")
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise bad_shape(f"query.{name}", f"query.{name}: {value!r:.60}, must be true or false")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_reprise_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RepriseError)
    return error_response(from_reprise_error(error))


async def _on_bug(request: Request, error: Exception) -> Response:
    get_logger().error("request failed", path=request.url.path, exc_info=error)
    return error_response(ApiError(500, "internal error; the gateway's log has the details"))
