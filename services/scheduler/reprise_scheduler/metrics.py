"""Every metric of the scheduler: the engine's, under the reference's names, and its own."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from reprise_core.models import WorkerCapacity
from reprise_core.requests import FinishReason
from reprise_scheduler.kv_cache.miss_reasons import MissKind
from reprise_scheduler.offload_metrics import OffloadMetrics
from reprise_scheduler.sched.backpressure import QueueLimit
from reprise_scheduler.sched.load_cost import LoadSkip
from reprise_scheduler.sched.outputs import Counters, Output
from reprise_scheduler.sched.request import Request
from reprise_scheduler.sched.scheduler import Scheduler
from reprise_scheduler.tier_events import TierEventCounters

F = TypeVar("F", Gauge, Counter)

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
           40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
            40.0, 80.0)  # fmt: skip
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
              480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REQUEST_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTS = (0, 1, 2, 5, 10, 20)

_CACHE_CONFIG_LABELS = (
    "_block_size_resolved", "block_size", "cache_dtype", "cache_hit_alignment_tokens",
    "effective_attention_block_size", "enable_mamba_shared_prefix_checkpoint", "enable_prefix_caching",
    "engine", "gpu_memory_utilization", "hash_block_size", "is_attention_free",
    "kv_cache_dtype_skip_layers", "kv_cache_layout", "kv_cache_max_concurrency", "kv_cache_memory_bytes",
    "kv_cache_size_tokens", "kv_offloading_backend", "kv_offloading_size", "kv_sharing_fast_prefill",
    "mamba_block_size", "mamba_cache_dtype", "mamba_cache_mode", "mamba_page_size_padded",
    "mamba_ssm_cache_dtype", "num_cpu_blocks", "num_gpu_blocks", "num_gpu_blocks_override",
    "prefix_cache_retention_interval", "prefix_caching_hash_algo", "prefix_match_unit",
    "replayssm_buffer_len", "skip_page_size_padded", "sliding_window", "swa_bounded_replay",
    "use_kda_recoverssm", "use_replayssm", "user_specified_block_size",
)  # fmt: skip


_SOURCE_OF_TIER = {
    "device": "device",
    "host": "host",
    "disk": "disk",
    "external": "external_unspecified",
    "p2p": "p2p",
}


class _Rising:
    """A counter of a sum that is kept elsewhere."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._seen = 0

    def set(self, total: int) -> None:
        self._counter.inc(total - self._seen)
        self._seen = total


class LinkMetrics:
    """The worker's link."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "reprise_scheduler_worker_"
        self.malformed = Counter(
            prefix + "malformed_messages", "Messages that did not parse", registry=registry
        )
        self.stale = Counter(prefix + "stale_messages", "Messages of another session", registry=registry)
        self.refused = Counter(prefix + "refusals", "Workers refused at hello", registry=registry)
        self.sessions = Counter(prefix + "sessions", "Sessions opened", registry=registry)
        self.lost = Counter(prefix + "losses", "Workers lost by silence", registry=registry)


class EventMetrics:
    """Batches on their way to the publisher."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "reprise_scheduler_event_"
        self.batches = Counter(prefix + "batches", "Event batches sent", registry=registry)
        self.events = Counter(prefix + "events", "Events sent", registry=registry)
        self.dropped_batches = Counter(
            prefix + "dropped_batches",
            "Event batches dropped because the queue was full or there was no publisher",
            registry=registry,
        )
        self.record_blocks = Gauge(
            prefix + "record_blocks", "Blocks in the record that the publisher can ask for", registry=registry
        )
        self.record_overflowed = Gauge(
            prefix + "record_overflowed", "1 while blocks are missing in it at its limit", registry=registry
        )
        self.states = Counter(
            prefix + "states",
            "States for the publisher, by what happened: begun, sent, given_up",
            ["outcome"],
            registry=registry,
        )
        self.refused = Counter(
            prefix + "refused",
            "Messages of a publisher that were refused, by cause: version, malformed, epoch",
            ["cause"],
            registry=registry,
        )
        self.silent = Gauge(
            prefix + "silent", "1 when blocks are cached and their events do not go out", registry=registry
        )


class TierMetrics:
    """Events of the tiers below the device."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "reprise_scheduler_"
        self.watching = Gauge(
            prefix + "tier_watching", "1 while the store tells of its tiers", registry=registry
        )
        self.breaks = Counter(prefix + "tier_watch_breaks", "Times the store was lost", registry=registry)
        self._rising = {
            field: _Rising(Counter(prefix + name, text, registry=registry))
            for field, name, text in (
                ("stored", "tier_blocks_stored", "Blocks announced in a tier"),
                ("removed", "tier_blocks_removed", "Blocks taken back"),
                (
                    "unknown",
                    "tier_blocks_unknown",
                    "Blocks that a tier has and that this engine does not know, so not announced",
                ),
            )
        }

    def show(self, counters: TierEventCounters) -> None:
        for field, rising in self._rising.items():
            rising.set(getattr(counters, field))


def step_overhead(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "reprise_scheduler_step_overhead_seconds",
        "A worker's result received to the next plan sent",
        buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05),
        registry=registry,
    )


class StreamMetrics:
    """Gateways' streams."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "reprise_scheduler_"
        self.gateways = Gauge(prefix + "gateways", "Gateways attached", registry=registry)
        self.breaks = Counter(prefix + "stream_breaks", "Streams that ended", registry=registry)
        self.grace_aborts = Counter(
            prefix + "grace_aborts", "Requests aborted because no gateway came back", registry=registry
        )
        self.merged = Counter(
            prefix + "merged_deltas", "Deltas merged because a gateway read slowly", registry=registry
        )
        self.deadlines = Counter(
            prefix + "deadlines_exceeded", "Requests ended because their time was up", registry=registry
        )
        self.rehashed = Counter(
            prefix + "rehashed_prompts", "Prompts that came without hashes of this profile", registry=registry
        )


class EngineMetrics:
    """The engine's metrics. Counters of tokens follow what the requests were admitted with."""

    def __init__(self, registry: CollectorRegistry, *, model_name: str, engine: str) -> None:
        self._registry = registry
        self._names = {"model_name": model_name, "engine": engine}
        self._label_names = tuple(self._names)
        self._seen = Counters()

        self._running = self._gauge("num_requests_running", "Requests in the running set")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the waiting queues")
        by_reason = self._family(
            Gauge, "num_requests_waiting_by_reason", "Waiting requests by reason", "reason"
        )
        self._waiting_capacity = by_reason.labels(**self._names, reason="capacity")
        self._waiting_deferred = by_reason.labels(**self._names, reason="deferred")
        by_stage = self._family(
            Gauge, "num_requests_kv_fetch_by_stage", "Requests that get blocks from the store", "stage"
        )
        self._fetch_stages = {
            stage: by_stage.labels(**self._names, stage=stage)
            for stage in ("waiting_to_start", "in_progress", "completed_waiting")
        }
        self._waiting_tokens = Gauge(
            "reprise_scheduler_waiting_tokens", "Tokens of the requests that wait", registry=registry
        )
        self._usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1")

        self._queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache")
        self._hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache")
        self._external_queries = self._counter(
            "external_prefix_cache_queries", "Tokens asked of the connector"
        )
        self._external_hits = self._counter(
            "external_prefix_cache_hits", "Tokens that the connector supplied"
        )
        self._preemptions = self._counter("num_preemptions", "Running requests put back into the queue")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens that got through prefill")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens whose KV was reused")
        cached_by = self._family(
            Counter, "prompt_tokens_cached_by_source", "Reused prompt tokens by tier", "source"
        )
        self._cached_by = {
            tier: cached_by.labels(**self._names, source=source) for tier, source in _SOURCE_OF_TIER.items()
        }
        by_source = self._family(
            Counter, "prompt_tokens_by_source", "Prompt tokens by origin of their KV", "source"
        )
        self._by_source = {
            source: by_source.labels(**self._names, source=source)
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        }
        success = self._family(Counter, "request_success", "Finished requests", "finished_reason")
        self._success = {
            reason: success.labels(**self._names, finished_reason=reason.value) for reason in FinishReason
        }
        success.labels(**self._names, finished_reason="repetition")

        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens per engine step", _STEP_TOKENS)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", _TTFT_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Time between two tokens", _TOKEN_S)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per generated token of a request", _TOKEN_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to finish", _REQUEST_S)
        self._queue = self._histogram("request_queue_time_seconds", "Time in the waiting queue", _REQUEST_S)
        self._inference = self._histogram(
            "request_inference_time_seconds", "Time in the running state", _REQUEST_S
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Time of the prefill phase", _REQUEST_S
        )
        self._decode = self._histogram("request_decode_time_seconds", "Time of the decode phase", _REQUEST_S)
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt length", _REQUEST_TOKENS)
        self._output_length = self._histogram(
            "request_generation_tokens", "Generated length", _REQUEST_TOKENS
        )
        self._max_output = self._histogram(
            "request_max_num_generation_tokens",
            "Longest generation among the parts of a request",
            _REQUEST_TOKENS,
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "The max_tokens parameter", _REQUEST_TOKENS
        )
        self._n = self._histogram("request_params_n", "The n parameter", _COUNTS)
        self._request_preemptions = self._histogram(
            "request_num_preemptions", "Preemptions of a request", _COUNTS
        )
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed anew per request", _REQUEST_TOKENS
        )
        rejections = Counter(
            "vllm:admission_rejections",
            "Requests turned away by queue limits",
            ("model_name", "reason"),
            registry=registry,
        )
        self.rejected = {
            limit: rejections.labels(model_name=model_name, reason=limit.value) for limit in QueueLimit
        }
        self.offload = OffloadMetrics(registry, self._names)
        self._own_counters(registry)

    def _own_counters(self, registry: CollectorRegistry) -> None:
        prefix = "reprise_scheduler_"
        self._collisions = _Rising(
            Counter(prefix + "hash_collisions", "Hits whose tokens were others", registry=registry)
        )
        self._pins_refused = _Rising(
            Counter(prefix + "pins_refused", "Pins past the limit on pinned blocks", registry=registry)
        )
        self._pinned_blocks = Gauge(prefix + "pinned_blocks", "Blocks that pins keep", registry=registry)
        misses = Counter(
            prefix + "lookup_misses",
            "Requests by why their look-up found no more",
            ("reason",),
            registry=registry,
        )
        self._misses = {kind: _Rising(misses.labels(reason=kind.value)) for kind in MissKind}
        skipped = Counter(
            prefix + "loads_skipped",
            "Requests of which blocks that the store has were computed, by why",
            ("reason",),
            registry=registry,
        )
        self._skipped = {
            "loads_skipped_slower": skipped.labels(reason=LoadSkip.SLOWER.value),
            "loads_skipped_no_room": skipped.labels(reason=LoadSkip.NO_ROOM.value),
        }
        self._loading_blocks = Gauge(
            prefix + "loading_blocks",
            "Blocks that loads fill, or have filled for requests that do not run yet",
            registry=registry,
        )
        self._own = {
            field: Counter(prefix + field, text, registry=registry)
            for field, text in (
                ("loads_started", "Requests whose external blocks were asked for"),
                ("load_failures", "Blocks that could not be loaded"),
                ("external_wait_timeouts", "Requests that went on without the store's answer"),
                ("lookups_again", "Preempted requests that the store was asked for once more"),
                ("preempted_external_hit_tokens", "Tokens that came from the store for preempted requests"),
                ("saves_offered", "Blocks offered to the store"),
                ("saves_dropped", "Blocks not saved because a queue was full"),
                ("stale_results", "Step results that no step in flight waited for"),
                ("priority_cuts", "Requests that asked for a better priority than their tenant may have"),
            )
        }

    # -- observing ----------------------------------------------------------------------------

    def observe_plan(self, num_tokens: int) -> None:
        if num_tokens:
            self._step_tokens.observe(num_tokens)

    def observe_outputs(self, outputs: Sequence[Output], now_s: float) -> None:
        self._generation_tokens.inc(sum(len(output.token_ids) for output in outputs))
        for output in outputs:
            request = output.request
            if output.token_ids and request.last_token_s is None:
                self._ttft.observe(now_s - request.arrival_s)
                self._observe_prompt(request)
            elif output.token_ids and request.last_token_s is not None:
                self._itl.observe(now_s - request.last_token_s)
            if output.token_ids:
                request.last_token_s = now_s
            if output.finish_reason is not None:
                self.observe_finish(request, output.finish_reason, now_s)

    def _observe_prompt(self, request: Request) -> None:
        sources = request.prompt_sources
        if sources is None:
            return
        self._prompt_tokens.inc(sources.prompt_tokens)
        self._cached.inc(sources.cached)
        for tier in ("device", "host", "disk", "external"):
            self._cached_by[tier].inc(getattr(sources, tier))
        external = sources.cached - sources.device
        self._by_source["local_cache_hit"].inc(sources.device)
        self._by_source["external_kv_transfer"].inc(external)
        self._by_source["local_compute"].inc(sources.prompt_tokens - sources.cached)
        self._computed.observe(sources.prompt_tokens - sources.cached)

    def observe_finish(self, request: Request, reason: FinishReason, now_s: float) -> None:
        self._success[reason].inc()
        num_output = request.num_output_tokens
        self._e2e.observe(now_s - request.arrival_s)
        self._prompt_length.observe(request.num_prompt_tokens)
        self._output_length.observe(num_output)
        self._max_output.observe(num_output)
        self._max_tokens.observe(request.sampling.max_tokens)
        self._n.observe(1)
        self._request_preemptions.observe(request.num_preemptions)
        if request.first_scheduled_s is not None:
            self._queue.observe(request.first_scheduled_s - request.arrival_s)
            self._inference.observe(now_s - request.first_scheduled_s)
        if request.first_scheduled_s is not None and request.first_token_s is not None:
            decode_s = now_s - request.first_token_s
            self._prefill.observe(request.first_token_s - request.first_scheduled_s)
            self._decode.observe(decode_s)
            if num_output > 1:
                self._tpot.observe(decode_s / (num_output - 1))

    def refresh(self, scheduler: Scheduler) -> None:
        """Gauges, and counters that the pure part keeps as sums; called before every scrape."""
        waiting_to_load = len(scheduler.connector.looking_up) + len(scheduler.gate.deferred)
        deferred = waiting_to_load + len(scheduler.loading)
        self._fetch_stages["waiting_to_start"].set(waiting_to_load)
        self._fetch_stages["in_progress"].set(len(scheduler.loading))
        self._fetch_stages["completed_waiting"].set(scheduler.gate.num_loaded)
        self._running.set(len(scheduler.running))
        self._waiting.set(scheduler.num_waiting)
        self._waiting_capacity.set(len(scheduler.waiting))
        self._waiting_deferred.set(deferred)
        self._waiting_tokens.set(scheduler.num_waiting_tokens)
        self._usage.set(scheduler.manager.usage)
        stats = scheduler.manager.take_stats()
        self._queries.inc(stats.queries)
        self._hits.inc(stats.hits)
        now, seen = scheduler.counters, self._seen
        self._preemptions.inc(now.preemptions - seen.preemptions)
        self._external_queries.inc(now.external_queried_tokens - seen.external_queried_tokens)
        self._external_hits.inc(now.external_hit_tokens - seen.external_hit_tokens)
        self._collisions.set(scheduler.num_hash_collisions)
        self._pins_refused.set(scheduler.num_pins_refused)
        self._pinned_blocks.set(scheduler.manager.num_pinned_blocks)
        for kind, rising in self._misses.items():
            rising.set(scheduler.lookup_misses[kind])
        self._loading_blocks.set(scheduler.gate.num_held_blocks)
        self.offload.refresh(scheduler)
        for field, counter in (*self._own.items(), *self._skipped.items()):
            counter.inc(getattr(now, field) - getattr(seen, field))
        self._seen = now.copy()

    def set_cache_config(self, capacity: WorkerCapacity, facts: Mapping[str, object]) -> None:
        """`facts` fill labels of the info gauge; what does not apply here reads None."""
        info = Gauge("vllm:cache_config_info", "Cache settings, in the labels", _CACHE_CONFIG_LABELS,
                     registry=None)  # fmt: skip
        labels: dict[str, object] = dict.fromkeys(_CACHE_CONFIG_LABELS)
        labels |= {
            "engine": self._names["engine"],
            "block_size": capacity.block_size,
            "_block_size_resolved": True,
            "hash_block_size": capacity.block_size,
            "effective_attention_block_size": capacity.block_size,
            "num_gpu_blocks": capacity.num_blocks,
            "kv_cache_memory_bytes": capacity.num_blocks * capacity.block_nbytes,
            "kv_cache_size_tokens": (capacity.num_blocks - 1) * capacity.block_size,
            **facts,
        }
        info.labels(**{name: str(value) for name, value in labels.items()}).set(1)
        if self._info is not None:
            self._registry.unregister(self._info)
        self._registry.register(info)
        self._info = info

    _info: Gauge | None = None

    # -- making families ----------------------------------------------------------------------

    def _family(self, kind: type[F], name: str, text: str, extra: str) -> F:
        return kind(f"vllm:{name}", text, (*self._label_names, extra), registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, self._label_names, registry=self._registry).labels(**self._names)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, self._label_names, registry=self._registry).labels(**self._names)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(f"vllm:{name}", text, self._label_names, buckets=buckets, registry=self._registry)
        return family.labels(**self._names)
