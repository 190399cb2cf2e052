"""One way to make a gRPC server: health, reflection, limits, and errors as status codes."""

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from reprise_core.errors import RepriseError, Unavailable
from reprise_runtime.tracing import ClientTracing, ServerTracing, Tracing
from reprise_wire.error_codec import GRPC_CODES

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
)
SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


def channel(
    address: str, tracing: Tracing | None = None, *, own_connection: bool = False
) -> grpc.aio.Channel:
    """A client channel with the limits and reconnect times of this system.

    Channels to one address share a connection, and while it is being reconnected their calls fail at once.
    `own_connection`: not this one; for somebody who keeps trying while the peer is away.
    """
    interceptors = [ClientTracing()] if tracing is not None and tracing.enabled else None
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", int(own_connection))]
    return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)


class GrpcServer:
    """`add` is given the server: `lambda server: add_StoreServiceServicer_to_server(servicer, server)`."""

    def __init__(
        self,
        address: str,
        *,
        services: Iterable[str],
        add: Callable[[grpc.aio.Server], None],
        tracing: Tracing | None = None,
    ) -> None:
        self._address = address
        interceptors: list[grpc.aio.ServerInterceptor] = [_ErrorInterceptor()]
        if tracing is not None and tracing.enabled:
            interceptors.insert(0, ServerTracing(tracing))
        self._server = grpc.aio.server(options=list(SERVER_OPTIONS), interceptors=interceptors)
        add(self._server)
        self._health = health.aio.HealthServicer()
        self._names = (*services, "")
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> None:
        """Raises Unavailable naming the address when it cannot be listened on."""
        try:
            self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {self._address}: {error}") from error
        await self._server.start()
        await self.set_serving(serving=True)

    async def set_serving(self, *, serving: bool) -> None:
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        await self.set_serving(serving=False)
        await self._server.stop(grace_s)


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """A RepriseError that leaves a servicer becomes its status code, with the message as details."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        codecs = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_guard_unary(handler.unary_unary), *codecs)
        if inspect.iscoroutinefunction(handler.unary_stream):  # one that writes by itself
            return grpc.unary_stream_rpc_method_handler(_guard_unary(handler.unary_stream), *codecs)
        if inspect.isasyncgenfunction(handler.unary_stream):
            return grpc.unary_stream_rpc_method_handler(_guard_stream(handler.unary_stream), *codecs)
        if inspect.isasyncgenfunction(handler.stream_stream):
            return grpc.stream_stream_rpc_method_handler(_guard_stream(handler.stream_stream), *codecs)
        return handler


def _guard_unary(behaviour: Any) -> Any:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except RepriseError as error:
            return await context.abort(GRPC_CODES[error.kind], str(error))

    return guarded


def _guard_stream(behaviour: Any) -> Any:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            async for response in behaviour(request, context):
                yield response
        except RepriseError as error:
            await context.abort(GRPC_CODES[error.kind], str(error))

    return guarded
