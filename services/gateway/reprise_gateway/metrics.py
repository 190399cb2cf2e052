"""Every metric of the gateway service."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
              160.0, 320.0)  # fmt: skip


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "reprise_gateway_"
        self.requests = Counter(
            prefix + "requests", "HTTP requests answered", ["route", "status"], registry=registry
        )
        self.inflight_requests = Gauge(
            prefix + "inflight_requests", "HTTP requests being worked on", registry=registry
        )
        self.inflight_sequences = Gauge(
            prefix + "inflight_sequences", "Sequences being generated", registry=registry
        )
        self.waiting_sequences = Gauge(
            prefix + "waiting_sequences", "Sequences that wait for an engine to come back", registry=registry
        )
        self.refused_requests = Counter(
            prefix + "refused_requests",
            "Requests refused at a limit: inflight_requests, inflight_sequences, body_bytes",
            ["limit"],
            registry=registry,
        )
        self.unknown_fields = Counter(
            prefix + "unknown_fields", "Fields of request bodies that nobody knows", registry=registry
        )
        self.deadlines = Counter(
            prefix + "deadlines_exceeded", "Requests whose own time limit passed", registry=registry
        )
        self.disconnects = Counter(
            prefix + "client_disconnects", "Requests whose client went away", registry=registry
        )
        self.engine_up = Gauge(
            prefix + "engine_up", "1 while the engine can serve", ["engine_address"], registry=registry
        )
        self.stream_breaks = Counter(
            prefix + "stream_breaks",
            "Streams that broke, by peer: engine, tokenizer",
            ["peer"],
            registry=registry,
        )
        self.resubmissions = Counter(
            prefix + "resubmissions", "Sequences given to an engine again", registry=registry
        )
        self.failed_sequences = Counter(
            prefix + "failed_sequences", "Sequences that ended with an error", ["kind"], registry=registry
        )
        self.first_token_seconds = Histogram(
            prefix + "time_to_first_token_seconds",
            "From the request's arrival to its first output token",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.request_seconds = Histogram(
            prefix + "request_seconds",
            "From the arrival of a generating request to its end",
            buckets=_LATENCY_S,
            registry=registry,
        )
