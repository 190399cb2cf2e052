"""Every metric of the worker, prefix reprise_worker_."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_TRANSFER_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class WorkerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"reprise_worker_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"reprise_worker_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"reprise_worker_{name}", text, buckets=buckets, registry=registry)

        self.steps = counter("steps", "Step plans executed.")
        self.step_seconds = histogram("step_seconds", "Time of one step, plan to result.", _STEP_BUCKETS)
        self.tokens_computed = counter("tokens_computed", "Tokens run through the model.")
        self.tokens_sampled = counter("tokens_sampled", "Tokens drawn.")
        self.requests = gauge("requests", "Requests that the worker holds state of.")
        self.adapters = gauge("adapters", "LoRA adapters served beside the model.")
        self.kv_blocks = gauge("kv_blocks", "Blocks of the pool, the null block included.")
        self.kv_bytes = gauge("kv_bytes", "Bytes of the pool.")
        self.kv_prefaulted_bytes = gauge("kv_prefaulted_bytes", "Bytes of the pool taken ahead of use.")
        self.sessions = counter("sessions", "Sessions opened with a scheduler.")
        self.sessions_dropped = counter("sessions_dropped", "Sessions that ended, by reason.", "reason")
        self.messages_stale = counter("messages_stale", "Messages of another session, dropped.")
        self.frames_malformed = counter("frames_malformed", "Frames that did not parse, by peer.", "peer")
        self.saves = counter("saves", "Blocks that the store accepted.")
        self.saves_dropped = counter("saves_dropped", "Saves dropped at a limit, by where.", "where")
        self.saves_failed = counter("saves_failed", "Saves that failed, by reason.", "reason")
        self.save_bytes = counter("save_bytes", "Bytes of saved block values.")
        self.loads = counter("loads", "Blocks filled from the store.")
        self.loads_by_index = counter(
            "loads_by_index", "Of these, found in the store's memory without asking."
        )
        self.loads_failed = counter("loads_failed", "Blocks that could not be filled, by reason.", "reason")
        self.load_bytes = counter("load_bytes", "Bytes of loaded block values.")
        self.load_seconds = histogram("load_seconds", "Time of one load, start to end.", _TRANSFER_BUCKETS)
        self.loads_pending = gauge("loads_pending", "Loads started and not yet ended.")
        self.store_memory_shared = gauge(
            "store_memory_shared", "1 while block values go through memory shared with the store."
        )
        self.staging_blocks_used = gauge(
            "staging_blocks_used", "Staged blocks: not yet sent, or being read by the store."
        )
