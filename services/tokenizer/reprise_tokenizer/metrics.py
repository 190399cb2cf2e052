"""Every metric of the tokenizer service."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_CALL_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class TokenizerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "reprise_tokenizer_"
        self.call_seconds = Histogram(
            prefix + "call_seconds",
            "Time of a call, waiting for a thread included",
            ["call"],
            buckets=_CALL_S,
            registry=registry,
        )
        self.refused_calls = Counter(
            prefix + "refused_calls",
            "Calls refused, by reason: invalid, queue_full",
            ["reason"],
            registry=registry,
        )
        self.waiting_calls = Gauge(
            prefix + "waiting_calls", "Calls that wait for a thread or are on one", registry=registry
        )
        self.prompt_tokens = Counter(prefix + "prompt_tokens", "Tokens made from prompts", registry=registry)
        self.hashed_blocks = Counter(prefix + "hashed_blocks", "Block hashes made", registry=registry)
        self.streams = Gauge(prefix + "streams", "Open detokenizing streams", registry=registry)
        self.stream_requests = Gauge(
            prefix + "stream_requests", "Requests with text state on an open stream", registry=registry
        )
        self.stream_tokens = Counter(
            prefix + "stream_tokens", "Output tokens turned into text", registry=registry
        )
        self.stop_matches = Counter(prefix + "stop_matches", "Stop strings that matched", registry=registry)
        self.late_updates = Counter(
            prefix + "late_updates",
            "Updates of requests that the stream does not know: ended, or never opened",
            registry=registry,
        )
        self.refused_streams = Counter(
            prefix + "refused_streams", "Streams ended because they held too many requests", registry=registry
        )
