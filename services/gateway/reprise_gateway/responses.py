"""Answers that stop their work as soon as the client is gone."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from reprise_gateway.errors import ApiError

T = TypeVar("T")
_DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))} if error.retry_after_s else None
    return json_response(error.body(), error.status, headers)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The work's result; cancels it and raises ClientGone when the client goes away first.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. `on_close` is called once, however it ends; `on_gone` when the client left."""

    def __init__(
        self, events: AsyncIterator[Any], *, on_gone: Callable[[], None], on_close: Callable[[], None]
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        # A stream has no length that could be known beforehand.
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._events = events
        self._on_gone = on_gone
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            else:
                self._on_gone()
        finally:
            leaving.cancel()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            # Not left to the generator: one that was never begun runs no `finally`.
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                data = b"data: " + msgspec.json.encode(event) + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as error:
            data = b"data: " + msgspec.json.encode(error.body()) + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            await _close(self._events)
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})


async def _close(events: AsyncIterator[Any]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
