"""A whole engine in one process: the same scheduler and the same worker, joined by memory.

The event loop plans; the step thread computes, as it does in the worker service. What the split adds
(sockets, encoding, the gateway's stream) is left out: this is the measure that the split is held
against.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from queue import SimpleQueue

from prometheus_client import CollectorRegistry

from reprise_core.hash_chain import BlockHasher
from reprise_core.ids import RequestId
from reprise_core.kv_events import KvEvent
from reprise_core.requests import FinishReason, SamplingParams
from reprise_core.steps import StepPlan, StepResult, TransferReport
from reprise_runtime.health import Readiness
from reprise_runtime.tracing import Tracing
from reprise_scheduler.engine_loop import EngineLoop
from reprise_scheduler.metrics import EngineMetrics, step_overhead
from reprise_scheduler.probe import OverheadProbe
from reprise_scheduler.request_traces import RequestTraces
from reprise_scheduler.sched.outputs import Output
from reprise_scheduler.sched.request import Request
from reprise_scheduler.settings import SchedulerSettings
from reprise_wire.step_codec import Hello
from reprise_worker.app import WorkerApp
from reprise_worker.ports import Event, PlanArrived, SchedulerConnection, SessionBegan
from reprise_worker.settings import WorkerSettings


class CountedEvents:
    """Events are made, as in an engine whose publisher reads them, and go nowhere."""

    def __init__(self) -> None:
        self.num_events = 0

    def send(self, events: Sequence[KvEvent]) -> None:
        self.num_events += len(events)

    def refresh_metrics(self, *, has_cached_blocks: bool) -> None:
        """They go nowhere, so there is nothing to watch."""


class MemoryLink:
    """Both sides of the worker's link. Results go to the event loop's thread, plans to the step thread."""

    def __init__(
        self, engine: EngineLoop, loop: asyncio.AbstractEventLoop, hello: Hello, inbox: SimpleQueue[Event]
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._hello = hello
        self._inbox = inbox
        self._session = secrets.token_bytes(16)

    def start(self) -> None:
        self._loop.call_soon_threadsafe(self._open)

    def _open(self) -> None:
        self._inbox.put(SessionBegan(self._session))
        self._engine.connect(self)
        self._engine.on_session(self._hello.model, self._hello.capacity)

    def stop(self) -> None: ...

    def send_plan(self, plan: StepPlan) -> None:
        self._inbox.put(PlanArrived(self._session, plan))

    def send_result(self, session: bytes, result: StepResult) -> None:
        self._loop.call_soon_threadsafe(self._engine.on_result, result)

    def send_transfers(self, session: bytes, report: TransferReport) -> None:
        self._loop.call_soon_threadsafe(self._engine.on_transfer, report)

    def drop_session(self, session: bytes) -> None:
        raise AssertionError("the worker refused a plan of its own process")

    def session_released(self) -> None: ...


class _Worker(WorkerApp):
    def __init__(self, settings: WorkerSettings, engine: EngineLoop) -> None:
        super().__init__(settings)
        self._engine = engine

    def connect_scheduler(self, hello: Hello, inbox: SimpleQueue[Event]) -> SchedulerConnection:
        return MemoryLink(self._engine, self._loop, hello, inbox)


class OneProcessEngine:
    """`generate` may be called from many tasks of the loop that called `start`."""

    def __init__(self, scheduler: SchedulerSettings, worker: WorkerSettings) -> None:
        self.registry = CollectorRegistry()
        self.readiness = Readiness("worker")
        self.events = CountedEvents()
        self._tracing = Tracing(scheduler.trace_exporter, scheduler.service, self.registry)
        self._engine = EngineLoop(
            scheduler,
            readiness=self.readiness,
            make_metrics=lambda model: EngineMetrics(self.registry, model_name=model.name, engine="0"),
            event_sink=self.events,
            external=None,
            deliver=self._deliver,
            probe=OverheadProbe(step_overhead(self.registry).observe),
            traces=RequestTraces(self._tracing, engine_id=scheduler.engine_id, clock=time.monotonic),
        )
        self._worker = _Worker(worker, self._engine)
        self._num_requests = 0

    async def start(self) -> None:
        """Returns when the model is loaded; raises what kept it from that."""
        await self._worker.start()
        failed = asyncio.ensure_future(self._worker.run())
        while not self.readiness.ready:
            await asyncio.wait({failed}, timeout=0.02)
            if failed.done():
                failed.result()
        failed.cancel()

    async def stop(self) -> None:
        await self._worker.stop()
        await self._engine.stop()
        await asyncio.to_thread(self._tracing.close)

    @property
    def hasher(self) -> BlockHasher:
        assert self._engine.hasher is not None
        return self._engine.hasher

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> list[int]:
        """The output tokens. Raises RepriseError when the request cannot be taken."""
        self._num_requests += 1
        chain = self.hasher.chain()
        chain.append(token_ids)
        ended: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()
        request = Request(
            request_id=RequestId(str(self._num_requests)),
            owner=ended,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            chain=chain,
            arrival_s=time.monotonic(),
            sequence=self._num_requests,
        )
        self._engine.submit(request)
        await ended
        return request.token_ids[len(token_ids) :]

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            owner = output.request.owner
            assert isinstance(owner, asyncio.Future)
            if output.finish_reason is not None and not owner.done():
                owner.set_result(output.finish_reason)
