"""Every metric of the store service."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class StoreMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"reprise_store_{name}", help_text, labels, registry=registry)

        def gauge(name: str, help_text: str, *labels: str) -> Gauge:
            return Gauge(f"reprise_store_{name}", help_text, labels, registry=registry)

        def seconds(name: str, help_text: str, *labels: str) -> Histogram:
            return Histogram(f"reprise_store_{name}", help_text, labels, buckets=_SECONDS, registry=registry)

        self.host_bytes = gauge("host_bytes", "Block bytes in the host tier")
        self.host_capacity_bytes = gauge("host_capacity_bytes", "Limit of the host tier")
        self.host_blocks = gauge("host_blocks", "Blocks in the host tier")
        self.host_evictions = counter("host_evictions", "Blocks that left the host tier to make room")
        self.lookup_blocks = counter("lookup_blocks", "Blocks asked for in look-ups")
        self.lookup_hits = counter("lookup_hits", "Blocks that look-ups found, by tier", "tier")
        self.loads = counter("loads", "Blocks asked for in loads, by where they were", "tier", "outcome")
        self.load_bytes = counter("load_bytes", "Block bytes handed to workers, by tier", "tier")
        self.saves = counter("saves", "Blocks offered to a tier, by outcome", "tier", "outcome")
        self.save_bytes = counter("save_bytes", "Block bytes written, by tier", "tier")
        self.save_queue_blocks = gauge("save_queue_blocks", "Blocks waiting to be written to Redis")
        self.save_queue_bytes = gauge("save_queue_bytes", "Block bytes waiting to be written to Redis")
        self.saves_dropped = counter(
            "saves_dropped",
            "Blocks not written to Redis: queue_full, unavailable, no_room or stale",
            "reason",
        )
        self.refused = counter("refused", "Transfers refused, by reason", "reason")
        self.malformed = counter("malformed", "Messages that are none of this protocol")
        self.replies_dropped = counter("replies_dropped", "Answers whose worker was gone or did not read")
        self.loads_waiting = gauge("loads_waiting", "Loads received and not yet answered")
        self.lookup_seconds = seconds("lookup_seconds", "Time of a look-up")
        self.load_seconds = seconds("load_seconds", "Time of a load, from message to answer")
        self.save_seconds = seconds("save_seconds", "Time of one write pipeline to Redis")
        self.breaker_state = gauge(
            "breaker_state", "0 closed, 1 half open, 2 open; calls to Redis and writes apart", "breaker"
        )
        self.redis_failures = counter("redis_failures", "Failed calls to Redis, by kind", "kind")
        self.redis_up = gauge("redis_up", "1 while Redis answers; 0 without one")
        self.resets = counter("resets", "Resets, by outcome", "outcome")
        self.swept_blocks = counter("swept_blocks", "Blocks of earlier generations deleted from Redis")
        self.generation_changes = counter(
            "generation_changes", "Times a scope was found at another generation than before"
        )
