"""Around every HTTP request: a bound on how many run at once, and a count of how they ended."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprise_gateway.errors import ApiError
from reprise_gateway.metrics import GatewayMetrics
from reprise_gateway.responses import error_response

_PROBES = frozenset({"/health", "/ping", "/version", "/metrics", "/load"})
"""Answered at any load, so that overload does not look like death."""


class RequestLimits:
    """Routes that we do not have are counted as `other`, or else clients could make endless label values."""

    def __init__(
        self, app: ASGIApp, *, routes: frozenset[str], max_inflight: int, metrics: GatewayMetrics
    ) -> None:
        self._app = app
        self._routes = routes
        self._max_inflight = max_inflight
        self._metrics = metrics
        self.num_inflight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        route = path if path in self._routes else "other"
        if path in _PROBES:
            await self._counted(self._app, route, scope, receive, send)
            return
        if self.num_inflight >= self._max_inflight:
            self._metrics.refused_requests.labels("inflight_requests").inc()
            message = f"{self._max_inflight} requests are being worked on already; try again later"
            refusal = error_response(ApiError(429, message, retry_after_s=1.0))
            await self._counted(refusal, route, scope, receive, send)
            return
        self._change(1)
        try:
            await self._counted(self._app, route, scope, receive, send)
        finally:
            self._change(-1)

    async def _counted(self, app: ASGIApp, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499  # unless an answer was begun

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, noting)
        finally:
            self._metrics.requests.labels(route, str(status)).inc()

    def _change(self, by: int) -> None:
        self.num_inflight += by
        self._metrics.inflight_requests.set(self.num_inflight)
