"""The scheduler service, wired."""

import asyncio
import time

from prometheus_client import CollectorRegistry

from reprise.v1.engine_pb2 import DESCRIPTOR
from reprise.v1.engine_pb2_grpc import add_EngineServicer_to_server
from reprise_core.models import ModelInfo
from reprise_core.requests import FinishReason
from reprise_runtime.grpc_server import GrpcServer, channel
from reprise_runtime.health import Readiness
from reprise_runtime.tracing import Tracing
from reprise_runtime.version import version
from reprise_scheduler.adapters.event_sender import EventSender
from reprise_scheduler.adapters.external_blocks import StoreBlocks
from reprise_scheduler.adapters.worker_link import WorkerLink
from reprise_scheduler.engine_loop import EngineLoop
from reprise_scheduler.gateway_streams import GatewayStreams
from reprise_scheduler.metrics import (
    EngineMetrics,
    EventMetrics,
    LinkMetrics,
    StreamMetrics,
    TierMetrics,
    step_overhead,
)
from reprise_scheduler.policies import policy_maker
from reprise_scheduler.probe import OverheadProbe, Probe
from reprise_scheduler.profile import check_shared_seed
from reprise_scheduler.request_traces import RequestTraces
from reprise_scheduler.servicer import EngineRpc
from reprise_scheduler.settings import SchedulerSettings
from reprise_scheduler.tier_watch import TierWatch
from reprise_wire.clients.tokenizer import TokenizerClient


class SchedulerApp:
    def __init__(self, settings: SchedulerSettings, probe: Probe | None = None) -> None:
        check_shared_seed(settings.prefix_caching_hash_algo, shared_store=bool(settings.store_address))
        policy_maker(settings)  # a policy that cannot be made stops the start
        self.registry = CollectorRegistry()
        self._tracing = Tracing(settings.trace_exporter, settings.service, self.registry)
        traces = RequestTraces(self._tracing, engine_id=settings.engine_id, clock=time.monotonic)
        self.readiness = Readiness("grpc")
        self.readiness.unmet("worker", f"waiting for a worker on {settings.workers_endpoint}")
        stream_metrics = StreamMetrics(self.registry)
        probe = probe or OverheadProbe(step_overhead(self.registry).observe)
        self._events = (
            EventSender(
                settings.publisher_endpoint,
                EventMetrics(self.registry),
                rank=settings.engine_index,
                queue_batches=settings.event_queue_batches,
                record_blocks=settings.event_record_blocks,
            )
            if settings.publisher_endpoint
            else None
        )
        self._external = (
            StoreBlocks(settings.store_address, namespace=settings.namespace, tracing=self._tracing)
            if settings.store_address
            else None
        )
        tiers = (
            TierWatch(
                self._external,
                self._events,
                TierMetrics(self.registry),
                integer_hashes=settings.event_integer_hashes,
            )
            if self._external is not None and self._events is not None and settings.tier_events
            else None
        )
        self._tokenizer = channel(settings.tokenizer_address, self._tracing)
        self._streams = GatewayStreams(
            stream_metrics,
            grace_s=settings.stream_grace_s,
            abort=lambda request: self._loop.finish(request, FinishReason.ABORT),
        )

        def make_metrics(model: ModelInfo) -> EngineMetrics:
            return EngineMetrics(self.registry, model_name=model.name, engine=str(settings.engine_index))

        self._loop = EngineLoop(
            settings,
            readiness=self.readiness,
            make_metrics=make_metrics,
            event_sink=self._events,
            external=self._external,
            deliver=self._streams.deliver,
            probe=probe,
            traces=traces,
            tiers=tiers,
        )
        self._link = WorkerLink(
            settings.workers_endpoint,
            self._loop,
            LinkMetrics(self.registry),
            probe,
            engine_id=settings.engine_id,
            timeout_s=settings.worker_timeout_s,
        )
        self._loop.connect(self._link)
        servicer = EngineRpc(
            settings,
            self._loop,
            self._streams,
            TokenizerClient(self._tokenizer),
            stream_metrics,
            self.registry,
            probe,
            traces,
            version=version(),
        )
        self._server = GrpcServer(
            settings.listen_address,
            services=[DESCRIPTOR.services_by_name["Engine"].full_name],
            add=lambda server: add_EngineServicer_to_server(servicer, server),  # type: ignore[no-untyped-call]
        )

    @property
    def num_running(self) -> int:
        return len(self._loop.scheduler.running) if self._loop.scheduler is not None else 0

    @property
    def num_waiting(self) -> int:
        return self._loop.scheduler.num_waiting if self._loop.scheduler is not None else 0

    async def start(self) -> None:
        if self._events is not None:
            self._events.start()
        await self._link.start()
        await self._server.start()
        self.readiness.met("grpc")

    async def run(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._loop.refresh_metrics()

    async def stop(self) -> None:
        await self._server.stop(0.5)
        await self._loop.stop()
        await self._link.stop()
        if self._events is not None:
            self._events.close()
        if self._external is not None:
            await self._external.close()
        await self._tokenizer.close()
        await asyncio.to_thread(self._tracing.close)
