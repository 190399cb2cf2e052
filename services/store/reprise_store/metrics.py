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
        self.disk_bytes = gauge("disk_bytes", "Block bytes in the disk tier")
        self.disk_capacity_bytes = gauge("disk_capacity_bytes", "Limit of the disk tier; 0 = none")
        self.disk_blocks = gauge("disk_blocks", "Blocks in the disk tier")
        self.disk_evictions = counter("disk_evictions", "Blocks that left the disk tier to make room")
        self.disk_queue_bytes = gauge("disk_queue_bytes", "Block bytes waiting to be written to disk")
        self.disk_dropped = counter(
            "disk_dropped", "Blocks not written to disk: queue_full, io_error, unavailable or stale", "reason"
        )
        self.disk_read_failures = counter("disk_read_failures", "Blocks whose file could not be read")
        self.lookup_blocks = counter("lookup_blocks", "Blocks asked for in look-ups")
        self.lookup_hits = counter("lookup_hits", "Blocks that look-ups found, by tier", "tier")
        self.loads = counter("loads", "Blocks asked for in loads, by where they were", "tier", "outcome")
        self.load_bytes = counter("load_bytes", "Block bytes handed to workers, by tier", "tier")
        self.saves = counter("saves", "Blocks offered to a tier, by outcome", "tier", "outcome")
        self.save_bytes = counter("save_bytes", "Block bytes written, by tier", "tier")
        self.save_queue_blocks = gauge("save_queue_blocks", "Blocks waiting for Redis or being written")
        self.save_queue_bytes = gauge("save_queue_bytes", "Block bytes waiting for Redis or being written")
        self.save_retries = counter(
            "save_retries", "Blocks that will be written again, as a connection failed"
        )
        self.saves_dropped = counter(
            "saves_dropped",
            "Blocks not written to Redis: queue_full, expired, unavailable, no_room or stale",
            "reason",
        )
        self.refused = counter("refused", "Transfers refused, by reason", "reason")
        self.malformed = counter("malformed", "Messages that are none of this protocol")
        self.replies_dropped = counter("replies_dropped", "Answers whose worker was gone or did not read")
        self.memory_peers = gauge("memory_peers", "Workers that share memory with this store")
        self.memory_leases = gauge("memory_leases", "Answers whose values a worker may still be reading")
        self.memory_leases_expired = counter("memory_leases_expired", "Leases that nobody released in time")
        self.memory_bytes = gauge("memory_bytes", "Pages of the shared arena")
        self.memory_full = counter("memory_full", "Values that found no room in the shared arena")
        self.loads_waiting = gauge("loads_waiting", "Loads received and not yet answered")
        self.lookup_seconds = seconds("lookup_seconds", "Time of a look-up")
        self.load_seconds = seconds("load_seconds", "Time of a load, from message to answer")
        self.save_seconds = seconds("save_seconds", "Time of one write pipeline to Redis")
        self.breaker_state = gauge(
            "breaker_state", "0 closed, 1 half open, 2 open; calls to Redis and writes apart", "breaker"
        )
        self.redis_failures = counter("redis_failures", "Failed calls to Redis, by kind", "kind")
        self.redis_up = gauge("redis_up", "1 while Redis answers; 0 without one")
        self.codec_bytes = counter(
            "codec_bytes", "Bytes of blocks written with a codec: plain, and as stored", "form"
        )
        self.values_refused = counter(
            "values_refused", "Stored values that could not be expanded: codec, length or damaged", "reason"
        )
        self.resets = counter("resets", "Resets, by outcome", "outcome")
        self.swept_blocks = counter("swept_blocks", "Blocks of earlier generations deleted from Redis")
        self.tier_watchers = gauge("tier_watchers", "Engines that hear of blocks coming and going")
        self.tier_watch_restarts = counter(
            "tier_watch_restarts", "Watchers that fell behind and were sent everything anew"
        )
        self.tier_changes_forgotten = counter(
            "tier_changes_forgotten", "Blocks past the number that is followed, told as removed"
        )
        self.generation_changes = counter(
            "generation_changes", "Times a scope was found at another generation than before"
        )
