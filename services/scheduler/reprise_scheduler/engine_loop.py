"""Drives the pure scheduler at its own pace: results in, plans out, everything on one event loop.

When a result arrives, the order is: apply it, plan and send the next step, and only then hand out
tokens, events and metrics. Nothing here waits: look-ups, resets and hashing are tasks beside it.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence

from reprise_core.errors import FailedPrecondition, RepriseError, Unavailable
from reprise_core.hash_chain import BlockHasher
from reprise_core.models import KvGroup, ModelInfo, WorkerCapacity
from reprise_core.requests import FinishReason
from reprise_core.steps import StepResult, TransferReport
from reprise_runtime.collector import spare_long_lived
from reprise_runtime.health import Readiness
from reprise_runtime.logs import LimitedLog, get_logger
from reprise_scheduler.kv_cache.config import GroupKind, GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.pins import Pin
from reprise_scheduler.metrics import EngineMetrics
from reprise_scheduler.policies import policy_maker
from reprise_scheduler.ports import EventSink, ExternalBlocks, PlanSink
from reprise_scheduler.probe import Mark, Probe
from reprise_scheduler.profile import make_profile
from reprise_scheduler.request_traces import RequestTraces
from reprise_scheduler.sched.backpressure import QueueFull
from reprise_scheduler.sched.outputs import Output
from reprise_scheduler.sched.request import Request
from reprise_scheduler.sched.scheduler import Scheduler
from reprise_scheduler.sched.served_adapters import check_adapters
from reprise_scheduler.sched.stored_blocks import NOTHING_STORED
from reprise_scheduler.settings import SchedulerSettings
from reprise_scheduler.store_lookup import find_stored
from reprise_scheduler.tier_watch import TierWatch
from reprise_wire.hash_profiles import HashProfile

Deliver = Callable[[Sequence[Output]], None]


class EngineLoop:
    """One engine. Not thread-safe: everything is called on the event loop."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        readiness: Readiness,
        make_metrics: Callable[[ModelInfo], EngineMetrics],
        event_sink: EventSink | None,
        external: ExternalBlocks | None,
        deliver: Deliver,
        probe: Probe,
        traces: RequestTraces,
        tiers: TierWatch | None = None,
    ) -> None:
        """`tiers` sends to the same sink."""
        self._settings = settings
        self._readiness = readiness
        self._make_metrics = make_metrics
        self._event_sink = event_sink
        self._external = external
        self._tiers = tiers
        self._deliver = deliver
        self._probe = probe
        self._traces = traces
        self._log = get_logger()
        self._limited = LimitedLog()
        self._plan_sink: PlanSink | None = None
        self._connected = False
        self._pump_scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.scheduler: Scheduler | None = None
        self.metrics: EngineMetrics | None = None
        self.model: ModelInfo | None = None
        self.capacity: WorkerCapacity | None = None
        self.profile: HashProfile | None = None
        self.hasher: BlockHasher | None = None

    def connect(self, plan_sink: PlanSink) -> None:
        self._plan_sink = plan_sink

    # -- requests -----------------------------------------------------------------------------

    def require_scheduler(self) -> Scheduler:
        """Raises Unavailable while no worker has ever registered."""
        if self.scheduler is None:
            raise Unavailable("no worker has registered with this engine yet")
        return self.scheduler

    def submit(self, request: Request) -> None:
        """Raises RepriseError when the request cannot be taken."""
        scheduler = self.require_scheduler()
        try:
            scheduler.add(request)
        except QueueFull as error:
            assert self.metrics is not None
            self.metrics.rejected[error.limit].inc()
            raise
        self._pump_soon()

    def finish(self, request: Request, reason: FinishReason, *, num_output_tokens: int | None = None) -> None:
        if self.scheduler is None or request.finished:
            return
        self.scheduler.finish(request, reason, num_output_tokens=num_output_tokens)
        self._traces.finish(request, reason)
        assert self.metrics is not None
        self.metrics.observe_finish(request, reason, time.monotonic())
        self._pump_soon()

    # -- the worker -----------------------------------------------------------------------------

    def on_session(self, model: ModelInfo, capacity: WorkerCapacity) -> None:
        if self.model is not None and model.name != self.model.name:
            raise FailedPrecondition(
                f"this engine serves {self.model.name!r}, the worker holds {model.name!r}"
            )
        check_adapters(model.adapters)
        self._traces.lost_worker()
        kv_config = self._kv_config(capacity)
        config = self._settings.scheduler_config(
            max_model_len=model.max_model_len, worker_max_tokens=capacity.max_num_batched_tokens
        )
        outputs: list[Output] = []
        if self.scheduler is None:
            self.scheduler = Scheduler(
                config,
                kv_config,
                enable_events=self._event_sink is not None,
                integer_hashes=self._settings.event_integer_hashes,
                enable_connector=self._external is not None and self._settings.enable_prefix_caching,
                eos_token_ids=model.eos_token_ids,
                make_policy=policy_maker(self._settings),
            )
            self.metrics = self._make_metrics(model)
        else:
            outputs = self.scheduler.open_session(config, kv_config, model.eos_token_ids, model.adapters)
        self.model, self.capacity = model, capacity
        self.profile = make_profile(self._settings.prefix_caching_hash_algo, capacity.block_size)
        self.hasher = self.profile.hasher()
        assert self.metrics is not None
        self.metrics.set_cache_config(capacity, self._cache_facts())
        spare_long_lived()  # the pool, above all
        self._connected = True
        self._readiness.met("worker")
        self._hand_out(outputs)
        if self._external is not None:
            self._spawn(self._ask_generation())
        if self._tiers is not None:
            self._tiers.follow(model.fingerprint, tuple(adapter.digest for adapter in model.adapters))
        self._pump_soon()

    def _kv_config(self, capacity: WorkerCapacity) -> KVCacheConfig:
        return KVCacheConfig(
            num_blocks=capacity.num_blocks,
            groups=tuple(_group_spec(group, capacity.block_size) for group in capacity.groups),
            enable_caching=self._settings.enable_prefix_caching,
            watermark=self._settings.watermark,
            full_prompt_hit=self._settings.full_prompt_hit,
            verify_tokens=self._settings.verify_tokens,
            track_misses=self._settings.track_misses,
            max_pinned_blocks=self._settings.max_pinned_blocks,
        )

    def _cache_facts(self) -> dict[str, object]:
        return {
            "enable_prefix_caching": self._settings.enable_prefix_caching,
            "prefix_caching_hash_algo": str(self._settings.prefix_caching_hash_algo),
            "kv_offloading_backend": "reprise" if self._external is not None else None,
            "is_attention_free": False,
        }

    def on_lost(self, why: str) -> None:
        self._connected = False
        self._traces.lost_worker()
        self._readiness.unmet("worker", f"lost the worker: {why}")
        if self.scheduler is not None:
            self.scheduler.lose_worker()
            self._send_events()

    def on_result(self, result: StepResult) -> None:
        assert self.scheduler is not None
        now_s = time.monotonic()
        outputs = self.scheduler.apply_result(result, now_s=now_s)
        self._probe.mark(Mark.APPLIED)
        self._pump()
        self._probe.mark(Mark.PUBLISHED)
        if self._traces.active:
            self._traces.received(result, now_s)
        self._hand_out(outputs)
        self._probe.mark(Mark.DELIVERED)

    def on_transfer(self, report: TransferReport) -> None:
        assert self.scheduler is not None
        assert self.metrics is not None
        self.metrics.offload.observe(report)
        self.scheduler.connector.saves_ended(sum(measure.num_blocks for measure in report.saved))
        if not report.loads:
            return
        outputs = self.scheduler.end_load(report.loads, now_s=time.monotonic())
        self._pump()
        self._hand_out(outputs)

    # -- planning -----------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        """Once for all that arrives in this turn of the loop."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        scheduler = self.scheduler
        if scheduler is None or not self._connected:
            return
        assert self._plan_sink is not None
        assert self.metrics is not None
        self._start_lookups(scheduler)
        while (plan := scheduler.plan_step(now_s=(planning_s := time.monotonic()))) is not None:
            self._probe.mark(Mark.PLANNED)
            self._plan_sink.send_plan(plan)
            self._probe.mark(Mark.SENT)
            if self._traces.active:
                self._traces.sent(plan, planning_s)
            self.metrics.observe_plan(plan.num_tokens)
        self._start_lookups(scheduler)  # of requests that were preempted just now
        self._send_events()

    def _hand_out(self, outputs: Sequence[Output]) -> None:
        if outputs:
            assert self.metrics is not None
            self._deliver(outputs)
            if self._traces.active:
                self._traces.finished(outputs)
            # After the gateways' writers, which were just woken.
            asyncio.get_running_loop().call_soon(self.metrics.observe_outputs, outputs, time.monotonic())

    def _send_events(self) -> None:
        assert self.scheduler is not None
        events = self.scheduler.take_events()
        if events and self._tiers is not None:
            self._tiers.send(events)
        elif events and self._event_sink is not None:
            self._event_sink.send(events)

    def refresh_metrics(self) -> None:
        if self.scheduler is not None and self.metrics is not None:
            self.metrics.refresh(self.scheduler)
            if self._tiers is not None:
                self._tiers.show()
            if self._event_sink is not None:
                self._event_sink.refresh_metrics(has_cached_blocks=self.scheduler.manager.has_cached_blocks)

    # -- pins -----------------------------------------------------------------------------------

    def pins(self) -> list[Pin]:
        return self.require_scheduler().pins(now_s=time.monotonic())

    def unpin(self, pin_id: int) -> bool:
        """False if there is no such pin, any more or at all."""
        found = self.require_scheduler().unpin(pin_id)
        self._pump_soon()  # somebody may have waited for these blocks
        return found

    # -- the external tier ----------------------------------------------------------------------

    def _start_lookups(self, scheduler: Scheduler) -> None:
        assert self.metrics is not None
        for request, attempt in scheduler.connector.take_lookups(time.monotonic()):
            started_s = time.monotonic()
            self._spawn(self._look_up(scheduler, request, attempt))
            self.metrics.offload.lookup_sync.observe(time.monotonic() - started_s)

    async def _look_up(self, scheduler: Scheduler, request: Request, attempt: int) -> None:
        assert self._external is not None
        assert self.capacity is not None
        stored = NOTHING_STORED
        generation: int | None = None
        num_hashes = (request.num_tokens - 1) // self.capacity.block_size
        groups = scheduler.manager.groups
        started_s = time.monotonic()
        expiry = asyncio.get_running_loop().call_later(
            self._settings.max_external_wait_s + 0.01, self._pump_soon
        )
        try:
            with self._traces.looking_up(request):
                stored, generation = await find_stored(
                    self._external,
                    self._fingerprint,
                    groups,
                    request.block_hashes[:num_hashes],
                    request.lora.digest if request.lora is not None else "",
                )
        except RepriseError as error:
            self._limited.warning(self._log, "look-up in the store failed", error=str(error))
        finally:
            expiry.cancel()
            assert self.metrics is not None
            self.metrics.offload.lookup_async.observe(time.monotonic() - started_s)
        if groups is not scheduler.manager.groups:
            return  # another worker has registered, and the store is asked again for its blocks
        scheduler.answer_lookup(request, attempt, stored, generation)
        self._pump_soon()

    async def _ask_generation(self) -> None:
        """Nothing is saved before the store has named its generation: ask until it does."""
        assert self._external is not None
        assert self.scheduler is not None
        delay_s = 0.2
        while self.scheduler.connector.generation is None:
            try:
                _, generation = await self._external.lookup(self._fingerprint, (0,), ())
                stats = await self._external.stats()
                assert self.metrics is not None
                assert self.capacity is not None
                self.metrics.offload.set_sizes(self.capacity.block_nbytes, stats.host_capacity_bytes)
                self.scheduler.connector.set_generation(generation)
            except RepriseError as error:
                self._limited.warning(self._log, "waiting for the store", error=str(error))
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, 5.0)

    @property
    def _fingerprint(self) -> str:
        assert self.model is not None
        return self.model.fingerprint

    async def reset_prefix_cache(
        self, *, preempt_running: bool, reset_external: bool
    ) -> tuple[bool, bool | None]:
        """Success on the device and, when it was asked for, in the external tier."""
        scheduler = self.require_scheduler()
        external: bool | None = None
        if reset_external:
            external = await self._reset_external(scheduler)
        deadline_s = time.monotonic() + 2.0
        # The blocks of a load in flight cannot be taken away: it ends, or times out, soon.
        while preempt_running and scheduler.loading and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        device = scheduler.reset_prefix_cache(preempt_running=preempt_running)
        self._send_events()
        self._pump_soon()
        return device, external

    async def _reset_external(self, scheduler: Scheduler) -> bool:
        if self._external is None:
            return True
        try:
            scheduler.connector.set_generation(await self._external.reset(self._fingerprint))
        except RepriseError as error:
            self._log.warning("reset of the external tier failed", error=str(error))
            return False
        return True

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        if self._tiers is not None:
            await self._tiers.stop()
        for task in list(self._tasks):
            task.cancel()


def _group_spec(group: KvGroup, block_size: int) -> GroupSpec:
    """Raises FailedPrecondition for a group that cannot be planned for."""
    if group.block_size == block_size:
        if group.kind == "full_attention":
            return GroupSpec(kind=GroupKind.FULL, block_size=block_size)
        # With a window of one token a load could have nothing to load.
        if group.kind == "sliding_window" and (group.window_tokens or 0) > 1:
            return GroupSpec(kind=GroupKind.SLIDING, block_size=block_size, window=group.window_tokens)
    raise FailedPrecondition(
        f"cannot plan for a group of kind {group.kind}, {group.block_size} tokens a block and a window of"
        f" {group.window_tokens}; known are full_attention and sliding_window (of 2 or more), with blocks of"
        f" {block_size} tokens"
    )
