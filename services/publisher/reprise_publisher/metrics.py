"""Every metric of the publisher service."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class PublisherMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"reprise_publisher_{name}", help_text, labels, registry=registry)

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"reprise_publisher_{name}", help_text, registry=registry)

        self.enabled = gauge("enabled", "1 while events are published, 0 when they are switched off")
        self.batches = counter("batches", "Batches published, by kind: events, cleared, heartbeat", "kind")
        self.published_bytes = counter("published_bytes", "Payload bytes published")
        self.batches_dropped = counter(
            "batches_dropped", "Numbers left unused, by cause: upstream (lost before they came here)", "cause"
        )
        self.duplicates = counter("duplicates", "Batches that came twice and were left out")
        self.malformed = counter(
            "malformed", "Messages that are none of these protocols, by socket", "socket"
        )
        self.epochs = counter("epochs", "Changes of scheduler epoch")
        self.next_sequence = gauge("next_sequence", "The number of the next batch")
        self.ring_batches = gauge("ring_batches", "Batches kept for replay")
        self.ring_bytes = gauge("ring_bytes", "Payload bytes kept for replay")
        self.replays = counter("replays", "Replay requests, by outcome: accepted or refused", "outcome")
        self.replay_readers = gauge("replay_readers", "Replays in progress")
        self.replays_given_up = counter("replays_given_up", "Readers that left or took nothing for too long")
        self.replay_batches_overtaken = counter(
            "replay_batches_overtaken", "Batches that left the ring before a slow reader got them"
        )
        self.replay_messages = counter("replay_messages", "Messages sent in replays")
