"""Event batches to the publisher. The step never waits for it.

Limit: `queue_batches` in the socket's queue; at the limit a batch is dropped and counted. Its
sequence number was given before, so the subscriber sees a gap.
"""

import secrets
import time
from collections.abc import Sequence

import zmq

from reprise_core.kv_events import KvEvent, KvEventBatch
from reprise_scheduler.metrics import EventMetrics
from reprise_wire.event_codec import encode_batch
from reprise_wire.event_intake import INTAKE_VERSION, IntakeHeader, encode_intake


class EventSender:
    def __init__(self, endpoint: str, metrics: EventMetrics, *, rank: int, queue_batches: int) -> None:
        self._metrics = metrics
        self._rank = rank
        self._epoch = secrets.token_bytes(16)
        self._sequence = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, queue_batches)
        self._socket.connect(endpoint)

    def send(self, events: Sequence[KvEvent]) -> None:
        header = encode_intake(IntakeHeader(INTAKE_VERSION, self._epoch, self._sequence))
        self._sequence += 1
        batch = encode_batch(
            KvEventBatch(ts=time.time(), events=tuple(events), data_parallel_rank=self._rank)
        )
        try:
            self._socket.send_multipart([header, batch], zmq.NOBLOCK)
        except zmq.Again:
            self._metrics.dropped_batches.inc()
        else:
            self._metrics.batches.inc()
            self._metrics.events.inc(len(events))

    def close(self) -> None:
        self._socket.close()
        self._context.term()
