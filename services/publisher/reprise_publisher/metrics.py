"""Every metric of the publisher service."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class PublisherMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"reprise_publisher_{name}", help_text, labels, registry=registry)

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"reprise_publisher_{name}", help_text, registry=registry)

        self.enabled = gauge("enabled", "1 while events are published, 0 when they are switched off")
        self.batches = counter(
            "batches", "Batches published, by kind: events, state, cleared, heartbeat", "kind"
        )
        self.published_bytes = counter("published_bytes", "Payload bytes published")
        self.batches_dropped = counter(
            "batches_dropped", "Numbers left unused, by cause: upstream (lost before they came here)", "cause"
        )
        self.duplicates = counter("duplicates", "Batches that came twice and were left out")
        self.malformed = counter(
            "malformed", "Messages that are none of these protocols, by socket", "socket"
        )
        self.replaced = counter(
            "replaced", "Messages of a source that another one has replaced: two of them share the intake"
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
        self.version_refused = counter("version_refused", "Intake messages of another protocol version")
        self.unknown_events = counter("unknown_events", "Events of unknown type, passed on but not recorded")
        self.states = counter(
            "states",
            "States of the source, by what happened: asked, received, given_up (the loss was accepted), "
            "stray_chunk (of none that is wanted)",
            "outcome",
        )
        self.held_bytes = gauge("held_bytes", "Live batches that wait for a state")
        self.held_dropped = counter("held_dropped", "Held batches dropped at the limit; the state has them")
        self.requests_dropped = counter("requests_dropped", "Requests to a source that could not be sent")
        self.complete = gauge("complete", "1 while nothing is known to be missing of what the source has")
        self.record_blocks = gauge("record_blocks", "Blocks that the source has, by its events")
        self.record_unresolved = gauge("record_unresolved", "Those whose parent or tokens nobody told")
        self.record_backlog_bytes = gauge("record_backlog_bytes", "Published batches not recorded yet")
        self.record_overflowed = gauge(
            "record_overflowed", "1 while blocks are missing because of record_blocks"
        )
        self.unknown_removals = gauge("unknown_removals", "Removed blocks that the record did not have")
        self.snapshots = counter("snapshots", "Snapshots, by outcome: accepted, refused, given_up", "outcome")
        self.snapshot_readers = gauge("snapshot_readers", "Snapshots in progress")
        self.curve_refused = counter("curve_refused", "Connections refused because their key is not allowed")
        self.rpc_readers = gauge("rpc_readers", "Readers of the gRPC event stream")
        self.rpc_refused = counter(
            "rpc_refused", "Readers refused, by cause: limit, off (the stream is not offered)", "cause"
        )
        self.rpc_batches = counter("rpc_batches", "Messages given to readers of the gRPC stream")
        self.rpc_snapshots = counter(
            "rpc_snapshots",
            "Snapshots for readers of the gRPC stream, by cause: fresh, foreign, partial, behind, gap, slow, "
            "untellable, completed",
            "cause",
        )
        self.rpc_events_left_out = counter(
            "rpc_events_left_out",
            "Events the gRPC stream cannot say, by cause: no_tokens, no_parent, report, malformed",
            "cause",
        )
        self.rpc_batches_dropped = counter(
            "rpc_batches_dropped", "Batches that found the hand-over to the gRPC stream full"
        )
        self.rpc_stalled = counter("rpc_stalled", "Readers ended because they took nothing for too long")
