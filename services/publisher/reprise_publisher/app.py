"""Wires the publisher together."""

import asyncio

import grpc
from prometheus_client import CollectorRegistry

from reprise.v1.publisher_service_pb2_grpc import add_PublisherServiceServicer_to_server
from reprise_publisher import kv_event_rpc
from reprise_publisher.adapters.curve import CurveKeys, read_curve_keys
from reprise_publisher.adapters.event_sockets import EventSockets, SocketOptions
from reprise_publisher.kv_event_feed import FeedOptions, KvEventFeed
from reprise_publisher.kv_event_rpc import KvEventServicer
from reprise_publisher.metrics import PublisherMetrics
from reprise_publisher.outgoing import OutgoingOptions, salt_key
from reprise_publisher.servicer import SERVICE_NAME, PublisherServicer
from reprise_publisher.settings import PublisherSettings
from reprise_publisher.source_follower import FollowerLimits
from reprise_runtime.grpc_server import GrpcServer
from reprise_runtime.health import Readiness
from reprise_runtime.logs import get_logger
from reprise_wire.events_config import socket_role


class PublisherApp:
    """Ready once its sockets are open. With events switched off it opens none but gRPC and says so."""

    def __init__(self, settings: PublisherSettings) -> None:
        self.registry = CollectorRegistry()
        self.readiness = Readiness("grpc", "events")
        self._settings = settings
        self._log = get_logger()
        self._metrics = PublisherMetrics(self.registry)
        publishes = settings.events.publishes
        curve = read_curve_keys(settings.curve_secret_key_file, settings.curve_allowed_keys_file)
        self.sockets = EventSockets(_socket_options(settings, curve), self._metrics) if publishes else None
        servicer = PublisherServicer(settings.events.topic, self.sockets)
        events_servicer = _events_servicer(settings, self.sockets, curve, self._metrics)

        def add(server: grpc.aio.Server) -> None:
            add_PublisherServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
            events_servicer.add_to(server)

        self._grpc = GrpcServer(
            settings.listen_address, services=[SERVICE_NAME, kv_event_rpc.SERVICE_NAME], add=add
        )
        self._ended: asyncio.Future[None] | None = None

    async def start(self) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        if self.sockets is None:
            self._log.warning("KV events are off: set enable_kv_cache_events in events_config")
        else:
            self._start_sockets(self.sockets)
        self.readiness.met("events")
        await self._grpc.start()
        self.readiness.met("grpc")

    async def run(self) -> None:
        assert self._ended is not None
        await self._ended

    async def stop(self) -> None:
        await self._grpc.stop(1.0)
        if self.sockets is not None:
            await asyncio.to_thread(self.sockets.stop)

    def _start_sockets(self, sockets: EventSockets) -> None:
        loop, ended = asyncio.get_running_loop(), self._ended
        assert ended is not None

        def settle(error: BaseException | None) -> None:
            if ended.done():
                return
            if error is not None:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        def on_end(error: BaseException | None) -> None:
            loop.call_soon_threadsafe(settle, error)

        sockets.start(on_end)
        self._metrics.enabled.set(1)
        self._log.info(
            "publishing KV events",
            topic=self._settings.events.topic,
            events=sockets.events_endpoint,
            replay=sockets.replay_endpoint or "off",
        )


def _outgoing_options(settings: PublisherSettings) -> OutgoingOptions:
    digests = settings.event_salts == "digest"
    return OutgoingOptions(
        token_ids=settings.event_token_ids,
        salt_key=salt_key(settings.event_salt_secret.get_secret_value()) if digests else None,
        form=settings.event_form,
    )


def _events_servicer(
    settings: PublisherSettings,
    sockets: EventSockets | None,
    curve: CurveKeys | None,
    metrics: PublisherMetrics,
) -> KvEventServicer:
    if sockets is None:
        return KvEventServicer(None, metrics, reason="KV events are off")
    if curve is not None and not settings.allow_plain_grpc:
        return KvEventServicer(None, metrics, reason="events are encrypted here, and gRPC is not")
    options = FeedOptions(
        rank=settings.data_parallel_rank,
        readers=settings.rpc_readers,
        queue_batches=settings.rpc_queue_batches,
        queue_bytes=settings.rpc_queue_bytes,
        needs_tokens=settings.event_token_ids,
    )
    return KvEventServicer(KvEventFeed(sockets, options, metrics), metrics, stall_s=settings.rpc_stall_s)


def _socket_options(settings: PublisherSettings, curve: CurveKeys | None) -> SocketOptions:
    events = settings.events
    return SocketOptions(
        intake_endpoint=settings.intake_endpoint,
        events_endpoint=settings.events_endpoint,
        events_role=socket_role(settings.events_endpoint, settings.bind_mode),
        replay_endpoint=settings.replay_endpoint,
        hwm=events.hwm,
        max_queue_size=events.max_queue_size,
        max_batch_bytes=settings.max_batch_bytes,
        topic=events.topic,
        rank=settings.data_parallel_rank,
        buffer_steps=events.buffer_steps,
        buffer_bytes=settings.buffer_bytes,
        replay_topic=settings.replay_topic,
        replay_readers=settings.replay_readers,
        replay_stall_s=settings.replay_stall_s,
        snapshot_readers=settings.snapshot_readers,
        record_blocks=settings.record_blocks,
        record_backlog_bytes=settings.record_backlog_bytes,
        limits=FollowerLimits(state_timeout_s=settings.state_timeout_s, hold_bytes=settings.hold_bytes),
        outgoing=_outgoing_options(settings),
        curve=curve,
        heartbeat_s=settings.heartbeat_s,
    )
