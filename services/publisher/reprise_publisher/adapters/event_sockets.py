"""The publisher's sockets, in one thread: ROUTER for the source, PUB out, ROUTER for replays and snapshots.

The thread never waits on a reader. PUB drops for a subscriber that does not read (it sees a gap), the
other ROUTER answers at each reader's pace, and when this thread itself is held up, batches wait in the
intake socket (at most `max_queue_size`), then the scheduler drops them and its numbers show the gap.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import zmq

from reprise_core.block_record import BlockRecord
from reprise_core.errors import DataLoss, Unavailable
from reprise_publisher.adapters.curve import CurveGate, CurveKeys
from reprise_publisher.metrics import PublisherMetrics
from reprise_publisher.outgoing import Outgoing, OutgoingOptions
from reprise_publisher.record_keeper import OnPublished, RecordKeeper
from reprise_publisher.record_pace import RecordPace
from reprise_publisher.replay_readers import ReplayReaders, Sent
from reprise_publisher.replay_ring import ReplayRing
from reprise_publisher.snapshot_readers import SnapshotReaders
from reprise_publisher.source_follower import FollowerLimits, SourceFollower
from reprise_publisher.stream import FrozenStream, PublishedStream
from reprise_publisher.thread_calls import ThreadCalls
from reprise_runtime.logs import LimitedLog, get_logger
from reprise_runtime.zmq_sockets import bind
from reprise_wire.event_codec import parse_replay_request
from reprise_wire.event_intake import INTAKE_VERSION, VersionMismatch
from reprise_wire.event_snapshot import parse_snapshot_request
from reprise_wire.events_config import SocketRole
from reprise_wire.zmq_frames import receive_frames

NO_LIMIT_QUEUE_SIZE = 100_000
"""What max_queue_size 0 (no limit, to the reference) becomes: nothing here is unlimited."""
REPLAY_HIGH_WATER_MESSAGES = 64
"""Per replay reader; more stay in the ring until it takes them."""
INTAKE_BURST_MESSAGES = 256
"""Batches taken in before replays get their turn."""
RETRY_FULL_READER_S = 0.005
IDLE_WAKE_S = 1.0
_MORE = int(zmq.SNDMORE)
LINGER_MS = 500
"""How long a stopping publisher goes on sending what is queued."""


@dataclass(frozen=True, slots=True)
class SocketOptions:
    intake_endpoint: str
    events_endpoint: str
    events_role: SocketRole
    replay_endpoint: str
    """Empty = neither replays nor snapshots."""
    hwm: int
    max_queue_size: int
    max_batch_bytes: int
    topic: str
    rank: int
    buffer_steps: int
    buffer_bytes: int
    replay_topic: bool
    replay_readers: int
    replay_stall_s: float
    snapshot_readers: int
    record_blocks: int
    record_backlog_bytes: int
    limits: FollowerLimits
    outgoing: OutgoingOptions
    curve: CurveKeys | None
    """None = events and replays are not encrypted."""
    heartbeat_s: float
    """0 = none."""


class EventSockets:
    """`start` opens the sockets and runs the thread; `on_end` is called in it when it ends, with the error
    that ended it or None."""

    def __init__(self, options: SocketOptions, metrics: PublisherMetrics) -> None:
        self._options = options
        self._metrics = metrics
        self._context = zmq.Context()
        self._intake = self._context.socket(zmq.ROUTER)
        self._pub = self._context.socket(zmq.PUB)
        # As `send_multipart` does it, without the layers around it, which cost more than the sending.
        self._send_frame = super(zmq.Socket, self._pub).send
        self._replay = self._context.socket(zmq.ROUTER)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = get_logger()
        self._limited = LimitedLog()
        self._gate: CurveGate | None = None
        self._make_stream()
        self._calls = ThreadCalls(self._context)
        self._poller = zmq.Poller()
        self._more_to_send = False
        self._pace = RecordPace()
        self._last_sent_s = monotonic()
        self.events_endpoint = options.events_endpoint
        self.replay_endpoint = options.replay_endpoint
        self.intake_endpoint = options.intake_endpoint

    def _make_stream(self) -> None:
        options, metrics = self._options, self._metrics
        outgoing = Outgoing(options.outgoing)
        self._ring = ReplayRing(limit_batches=options.buffer_steps, limit_bytes=options.buffer_bytes)
        self._keeper = RecordKeeper(
            BlockRecord(limit_blocks=options.record_blocks),
            outgoing,
            rank=options.rank,
            limit_bytes=options.record_backlog_bytes,
            metrics=metrics,
        )
        self.stream = PublishedStream(
            topic=options.topic,
            rank=options.rank,
            ring=self._ring,
            keeper=self._keeper,
            outgoing=outgoing,
            publish=self._publish,
            metrics=metrics,
        )
        self._follower = SourceFollower(self.stream, self._ask_source, options.limits, metrics)
        self._replays = ReplayReaders(
            self._ring,
            topic=options.topic,
            with_topic=options.replay_topic,
            limit=options.replay_readers,
            stall_s=options.replay_stall_s,
            send=self._send_replay,
            metrics=metrics,
        )
        self._snapshots = SnapshotReaders(
            self.stream.freeze,
            outgoing,
            topic=options.topic,
            rank=options.rank,
            limit=options.snapshot_readers,
            stall_s=options.replay_stall_s,
            send=self._send_replay,
            metrics=metrics,
        )

    # -- for other threads --------------------------------------------------------------------------

    @property
    def first_replay_sequence(self) -> int:
        """Of the oldest batch that a replay can give; the next one's while there is none."""
        first = self._ring.first_sequence
        return self.stream.next_sequence if first is None else first

    @property
    def num_recorded_blocks(self) -> int:
        return self._keeper.record.num_blocks

    @property
    def last_sequence(self) -> int:
        """Of the batch that listeners were told of last."""
        return self._keeper.sequence

    @property
    def complete(self) -> bool:
        return self.stream.complete

    def published_after(self, sequence: int) -> Sequence[tuple[int, bytes]]:
        """Number and payload of what is kept of the batches after `sequence`."""
        return self._ring.after(sequence)

    def freeze_now(self) -> tuple[int, FrozenStream, bool]:
        """The number of the last batch, the state after it, and whether that is all the source has.

        Waits for the sockets' thread, some milliseconds. Raises Unavailable when that has ended.
        """
        frozen = self._calls.call(self.stream.freeze)
        return frozen.sequence, frozen, frozen.complete

    def subscribe(self, callback: OnPublished) -> Callable[[], None]:
        """`callback` gets number, payload and batch of all that is published later, in the sockets' thread,
        and must not raise. The answer undoes it."""
        self._keeper.listen(callback)
        return lambda: self._keeper.unlisten(callback)

    # -- life ---------------------------------------------------------------------------------------

    def start(self, on_end: Callable[[BaseException | None], None]) -> None:
        """Raises Unavailable for an endpoint that cannot be opened."""
        self._open()
        self._thread = threading.Thread(target=self._run, args=(on_end,), name="events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the sockets are closed; what is queued for subscribers gets LINGER_MS."""
        self._stopping.set()
        if self._thread is not None:
            self._calls.wake()
            self._thread.join()
        for socket in (self._intake, self._pub, self._replay):
            socket.close()
        self._calls.close()
        if self._gate is not None:
            self._gate.stop()
        self._context.term()

    def _open(self) -> None:
        options = self._options
        for socket in (self._intake, self._replay):
            socket.linger = 0
            socket.router_mandatory = True
        self._pub.linger = LINGER_MS
        self._pub.sndhwm = options.hwm
        self._intake.rcvhwm = options.max_queue_size or NO_LIMIT_QUEUE_SIZE
        self._intake.maxmsgsize = options.max_batch_bytes
        self._replay.sndhwm = REPLAY_HIGH_WATER_MESSAGES
        self._secure()
        self.intake_endpoint = _open_one(self._intake, options.intake_endpoint, SocketRole.BIND)
        self.events_endpoint = _open_one(self._pub, options.events_endpoint, options.events_role)
        if options.replay_endpoint:
            self.replay_endpoint = _open_one(self._replay, options.replay_endpoint, SocketRole.BIND)
            self._poller.register(self._replay, zmq.POLLIN)
        self._poller.register(self._intake, zmq.POLLIN)
        self._poller.register(self._calls.socket, zmq.POLLIN)

    def _secure(self) -> None:
        """Where subscribers connect; the intake is for this machine."""
        if self._options.curve is None:
            return
        self._gate = CurveGate(self._context, self._options.curve, self._metrics.curve_refused.inc)
        self._gate.start()
        for socket in (self._pub, self._replay):
            self._gate.secure(socket)

    def _run(self, on_end: Callable[[BaseException | None], None]) -> None:
        error: BaseException | None = None
        try:
            self._follower.start()
            while not self._stopping.is_set():
                self._turn()
        except Exception as problem:
            error = problem
        self.stream.close()
        self._calls.end()
        on_end(error)

    def _turn(self) -> None:
        """Wait for something to do; intake first, then one burst for each reader."""
        ready = dict(self._poller.poll(self._patience_ms()))
        if self._intake in ready:
            self._take_in()
            self._pace.batches_came(now_s=monotonic())
        self._record()
        self._follower.advance(now_s=monotonic())
        if self._replay in ready:
            self._take_requests()
        if self._calls.socket in ready:
            self._calls.run()
        replays_go_on = self._replays.advance(now_s=monotonic())
        self._more_to_send = self._snapshots.advance(now_s=monotonic()) or replays_go_on
        self._beat_if_silent()
        self._show()

    def _patience_ms(self) -> int:
        if self._more_to_send:
            return 0
        wait_s = RETRY_FULL_READER_S if len(self._replays) or len(self._snapshots) else IDLE_WAKE_S
        now_s = monotonic()
        if self._keeper.is_behind:
            wait_s = min(wait_s, self._pace.wait_s(now_s=now_s))
            if not wait_s:
                return 0
        if self._options.heartbeat_s:
            wait_s = min(wait_s, self._last_sent_s + self._options.heartbeat_s - now_s)
        if self._follower.deadline_s is not None:
            wait_s = min(wait_s, self._follower.deadline_s - now_s)
        return int(max(0.0, wait_s) * 1000) + 1

    def _record(self) -> None:
        started_s = monotonic()
        if not self._keeper.is_behind or self._pace.wait_s(now_s=started_s):
            return
        lag_s = self._keeper.lag_s(started_s)
        self._keeper.advance()
        self._pace.recorded(started_s=started_s, ended_s=monotonic(), lag_s=lag_s)

    # -- the source -----------------------------------------------------------------------------------

    def _take_in(self) -> None:
        now_s = monotonic()
        for _ in range(INTAKE_BURST_MESSAGES):
            try:
                identity, *frames = receive_frames(self._intake)
            except zmq.Again:
                return
            try:
                self._follower.take_in(identity, frames, now_s=now_s)
            except VersionMismatch as error:
                self._metrics.version_refused.inc()
                self._limited.warning(
                    self._log, "event source refused", its_version=error.theirs, our_version=INTAKE_VERSION
                )
            except DataLoss as error:
                self._metrics.malformed.labels("intake").inc()
                self._limited.warning(self._log, "malformed event message", problem=str(error))

    def _ask_source(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            self._intake.send_multipart([identity, *frames], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._metrics.requests_dropped.inc()

    # -- readers --------------------------------------------------------------------------------------

    def _take_requests(self) -> None:
        while True:
            try:
                frames = receive_frames(self._replay)
            except zmq.Again:
                return
            snapshot = parse_snapshot_request(frames)
            if snapshot is not None:
                self._snapshots.request(snapshot, now_s=monotonic())
                continue
            request = parse_replay_request(frames)
            if request is None:
                self._metrics.malformed.labels("replay").inc()
                self._limited.warning(self._log, "malformed replay request", num_frames=len(frames))
                continue
            accepted = self._replays.request(request, now_s=monotonic())
            self._metrics.replays.labels("accepted" if accepted else "refused").inc()

    def _publish(self, frames: Sequence[bytes]) -> None:
        topic, number, payload = frames
        self._send_frame(topic, _MORE)
        self._send_frame(number, _MORE)
        self._send_frame(payload)
        self._last_sent_s = monotonic()

    def _send_replay(self, frames: Sequence[bytes]) -> Sent:
        try:
            self._replay.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        self._metrics.replay_messages.inc()
        return Sent.DONE

    def _beat_if_silent(self) -> None:
        now_s = monotonic()
        if self._options.heartbeat_s and now_s - self._last_sent_s >= self._options.heartbeat_s:
            self.stream.heartbeat()

    def _show(self) -> None:
        metrics, record = self._metrics, self._keeper.record
        metrics.record_backlog_bytes.set(self._keeper.num_waiting_bytes)
        self.stream.show()
        metrics.next_sequence.set(self.stream.next_sequence)
        metrics.ring_batches.set(len(self._ring))
        metrics.ring_bytes.set(self._ring.num_bytes)
        metrics.replay_readers.set(len(self._replays))
        metrics.snapshot_readers.set(len(self._snapshots))
        metrics.held_bytes.set(self._follower.num_held_bytes)
        metrics.complete.set(self.stream.complete)
        metrics.record_blocks.set(record.num_blocks)
        metrics.record_unresolved.set(record.num_unresolved)
        metrics.record_overflowed.set(record.overflowed)
        metrics.unknown_removals.set(record.num_unknown_removals)


def _open_one(socket: zmq.Socket[bytes], endpoint: str, role: SocketRole) -> str:
    """The endpoint in fact opened."""
    socket.ipv6 = "[" in endpoint or "::" in endpoint
    if role is SocketRole.BIND:
        return bind(socket, endpoint)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise Unavailable(f"cannot connect {endpoint}: {error.strerror}") from error
    return endpoint
