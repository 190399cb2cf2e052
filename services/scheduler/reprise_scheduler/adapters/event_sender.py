"""Event batches to the publisher, and the state of the caches when it asks. The step never waits for it.

Limit: `queue_batches` in the socket's queue, none while there is no publisher; at the limit a batch is
dropped and counted. Its sequence number was given before, so the publisher sees a gap, and asks for the
state.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence

import zmq

from reprise_core.block_record import BlockRecord
from reprise_core.errors import DataLoss
from reprise_core.kv_events import KvEvent, KvEventBatch
from reprise_runtime.logs import LimitedLog, get_logger
from reprise_runtime.zmq_sockets import SocketReader
from reprise_scheduler.metrics import EventMetrics
from reprise_scheduler.state_answer import StateAnswer, StateSource
from reprise_wire.event_codec import encode_batch
from reprise_wire.event_intake import (
    INTAKE_VERSION,
    RequestKind,
    VersionMismatch,
    batch_frames,
    hello_frames,
    parse_request,
)

HELLO_S = 1.0
CHUNK_PAUSE_S = 0.001
"""Between two chunks of a state, for steps."""
FULL_PAUSE_S = 0.02
STATE_STALL_S = 10.0
"""A publisher that acknowledges nothing for so long is given up."""
SILENT_AFTER_S = 8.0


class EventSender:
    """Keeps the record of what was sent, which is what the caches hold: batches that were dropped too."""

    def __init__(
        self, endpoint: str, metrics: EventMetrics, *, rank: int, queue_batches: int, record_blocks: int
    ) -> None:
        self._endpoint = endpoint
        self._metrics = metrics
        self._rank = rank
        self.record = BlockRecord(limit_blocks=record_blocks)
        self._epoch = secrets.token_bytes(16)
        self._sequence = 0
        self._num_sent = 0
        self._failing_since_s: float | None = None
        self._cached_since_s: float | None = None
        self._answer: StateAnswer | None = None
        self._pump: asyncio.TimerHandle | None = None
        self._hello: asyncio.TimerHandle | None = None
        self._log = get_logger()
        self._limited = LimitedLog()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, queue_batches)
        # Without this, what is sent to nobody would wait for a publisher that cannot use it.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.connect(endpoint)
        self._reader = SocketReader(self._socket, self._on_message)

    def start(self) -> None:
        self._reader.start()
        self._say_hello()

    def send(self, events: Sequence[KvEvent]) -> None:
        batch = encode_batch(
            KvEventBatch(ts=time.time(), events=tuple(events), data_parallel_rank=self._rank)
        )
        frames = batch_frames(self._epoch, self._sequence, batch)
        self._sequence += 1
        if self._offer(frames):
            self._num_sent += 1
            self._failing_since_s = None
            self._metrics.batches.inc()
            self._metrics.events.inc(len(events))
        else:
            self._failing_since_s = self._failing_since_s or time.monotonic()
            self._metrics.dropped_batches.inc()
        for event in events:
            self.record.apply(event)

    def refresh_metrics(self, *, has_cached_blocks: bool) -> None:
        """Called about once a second. `has_cached_blocks` is what the cache says, not its events."""
        self._metrics.record_blocks.set(self.record.num_blocks)
        self._metrics.record_overflowed.set(self.record.overflowed)
        now_s = time.monotonic()
        if has_cached_blocks and not self._num_sent:
            self._cached_since_s = self._cached_since_s or now_s
        else:
            self._cached_since_s = None
        since_s = min(self._cached_since_s or now_s, self._failing_since_s or now_s)
        silent = now_s - since_s >= SILENT_AFTER_S
        self._metrics.silent.set(silent)
        if silent:
            self._limited.warning(
                self._log,
                "KV events are configured and blocks are cached, but no events go out",
                publisher=self._endpoint,
            )

    def close(self) -> None:
        for timer in (self._pump, self._hello):
            if timer is not None:
                timer.cancel()
        self._reader.stop()
        self._socket.close()
        self._context.term()

    def _offer(self, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._reader.kick()
        return True

    def _say_hello(self) -> None:
        """So that a publisher that starts beside an idle scheduler hears of it, and a lost tail shows."""
        self._offer(hello_frames(self._epoch, self._sequence))
        answer = self._answer
        if answer is not None and time.monotonic() - answer.progress_s > STATE_STALL_S:
            self._answer = None
            self._metrics.states.labels("given_up").inc()
        self._hello = asyncio.get_running_loop().call_later(HELLO_S, self._say_hello)

    # -- the state --------------------------------------------------------------------------------

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            request = parse_request(frames)
        except VersionMismatch as error:
            self._metrics.refused.labels("version").inc()
            self._limited.warning(
                self._log, "publisher refused", its_version=error.theirs, our_version=INTAKE_VERSION
            )
            return
        except DataLoss as error:
            self._metrics.refused.labels("malformed").inc()
            self._limited.warning(self._log, "malformed request of the publisher", problem=str(error))
            return
        if request.epoch != self._epoch:
            self._metrics.refused.labels("epoch").inc()
        elif request.kind is RequestKind.WANT_STATE:
            self._begin_state(request.state_id)
        elif self._answer is not None:
            self._answer.acknowledge(request.state_id, request.index, now_s=time.monotonic())
            self._pump_after(0)

    def _begin_state(self, state_id: int) -> None:
        """The one that was on its way is no longer wanted."""
        complete = not self.record.overflowed
        source = StateSource(self._epoch, self._sequence, self._rank, complete)
        self._answer = StateAnswer(state_id, self.record.freeze(), source, now_s=time.monotonic())
        self._metrics.states.labels("begun").inc()
        self._pump_after(0)

    def _pump_after(self, delay_s: float) -> None:
        if self._pump is None:
            self._pump = asyncio.get_running_loop().call_later(delay_s, self._send_chunk)

    def _send_chunk(self) -> None:
        self._pump = None
        answer = self._answer
        if answer is None or not answer.may_send:
            return
        if not self._offer(answer.message()):
            self._pump_after(FULL_PAUSE_S)
            return
        answer.sent()
        if answer.done:
            self._answer = None
            self._metrics.states.labels("sent").inc()
        else:
            self._pump_after(CHUNK_PAUSE_S)
