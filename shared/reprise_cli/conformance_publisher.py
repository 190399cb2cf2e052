"""The publisher service without its sockets, for the recorded streams."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from reprise_core.block_record import BlockRecord
from reprise_core.kv_events import KvEventBatch
from reprise_publisher.metrics import PublisherMetrics
from reprise_publisher.outgoing import Outgoing, OutgoingOptions
from reprise_publisher.record_keeper import RecordKeeper
from reprise_publisher.replay_readers import ReplayReaders, Sent
from reprise_publisher.replay_ring import ReplayRing
from reprise_publisher.stream import PublishedStream
from reprise_wire.event_codec import EventForm, ReplayRequest, encode_batch

NO_LIMIT = 2**40


class ConformancePublisher:
    """Publishes what it is given, at once."""

    def __init__(
        self,
        *,
        topic: str,
        rank: int,
        buffer_steps: int,
        form: EventForm = EventForm.MAP,
        first_sequence: int = 0,
    ) -> None:
        metrics = PublisherMetrics(CollectorRegistry())
        outgoing = Outgoing(OutgoingOptions(form=form))
        record = BlockRecord(limit_blocks=1)
        ring = ReplayRing(limit_batches=buffer_steps, limit_bytes=NO_LIMIT)
        self._live: list[list[bytes]] = []
        self._replayed: list[list[bytes]] = []
        self._stream = PublishedStream(
            topic=topic,
            rank=rank,
            ring=ring,
            keeper=RecordKeeper(record, outgoing, rank=rank, limit_bytes=NO_LIMIT, metrics=metrics),
            outgoing=outgoing,
            publish=lambda frames: self._live.append(list(frames)),
            metrics=metrics,
        )
        self._stream.next_sequence = first_sequence
        self._readers = ReplayReaders(
            ring, topic=topic, with_topic=True, limit=1, stall_s=1.0, send=self._send, metrics=metrics
        )

    def publish(self, batch: KvEventBatch) -> list[bytes]:
        """The frames of the live message. Raises PublisherClosed after `close`."""
        payload = encode_batch(batch)
        self._stream.publish("events", payload)
        return self._live[-1]

    def replay(self, request: ReplayRequest) -> list[list[bytes]]:
        """All messages of the answer, the end mark last."""
        self._replayed = []
        self._readers.request(request, now_s=0.0)
        while self._readers.advance(now_s=0.0):
            pass
        return self._replayed

    def close(self) -> None:
        self._stream.close()

    def _send(self, frames: Sequence[bytes]) -> Sent:
        self._replayed.append(list(frames))
        return Sent.DONE
