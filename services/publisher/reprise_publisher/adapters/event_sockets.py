"""The publisher's sockets, in one thread: PULL in, PUB out, ROUTER for replay.

The thread never waits on a reader. PUB drops for a subscriber that does not read (it sees a gap), the
ROUTER answers at each reader's pace, and when this thread itself is held up, batches wait in the PULL
socket (at most `max_queue_size`), then the scheduler drops them and its numbers show the gap.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import zmq

from reprise_core.errors import DataLoss, Unavailable
from reprise_publisher.metrics import PublisherMetrics
from reprise_publisher.replay_readers import ReplayReaders, Sent
from reprise_publisher.replay_ring import ReplayRing
from reprise_publisher.stream import PublishedStream
from reprise_runtime.logs import LimitedLog, get_logger
from reprise_wire.event_codec import parse_replay_request
from reprise_wire.events_config import SocketRole

NO_LIMIT_QUEUE_SIZE = 100_000
"""What max_queue_size 0 (no limit, to the reference) becomes: nothing here is unlimited."""
REPLAY_HIGH_WATER_MESSAGES = 64
"""Per replay reader; more stay in the ring until it takes them."""
INTAKE_BURST_MESSAGES = 256
"""Batches taken in before replays get their turn."""
RETRY_FULL_READER_S = 0.005
IDLE_WAKE_S = 1.0
LINGER_MS = 500
"""How long a stopping publisher goes on sending what is queued."""


@dataclass(frozen=True, slots=True)
class SocketOptions:
    intake_endpoint: str
    events_endpoint: str
    events_role: SocketRole
    replay_endpoint: str
    """Empty = no replay."""
    hwm: int
    max_queue_size: int
    max_batch_bytes: int
    topic: str
    rank: int
    buffer_steps: int
    buffer_bytes: int
    replay_readers: int
    replay_stall_s: float
    heartbeat_s: float
    """0 = none."""


class EventSockets:
    """`start` opens the sockets and runs the thread; `on_end` is called in it when it ends, with the error
    that ended it or None."""

    def __init__(self, options: SocketOptions, metrics: PublisherMetrics) -> None:
        self._options = options
        self._metrics = metrics
        self._context = zmq.Context()
        self._intake = self._context.socket(zmq.PULL)
        self._pub = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._waker = self._context.socket(zmq.PAIR)
        self._wake_end = self._context.socket(zmq.PAIR)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = get_logger()
        self._limited = LimitedLog()
        self._ring = ReplayRing(limit_batches=options.buffer_steps, limit_bytes=options.buffer_bytes)
        self._readers = ReplayReaders(
            self._ring,
            topic=options.topic,
            limit=options.replay_readers,
            stall_s=options.replay_stall_s,
            send=self._send_replay,
            metrics=metrics,
        )
        self.stream = PublishedStream(
            topic=options.topic,
            rank=options.rank,
            ring=self._ring,
            publish=self._publish,
            metrics=metrics,
        )
        self._poller = zmq.Poller()
        self._more_to_replay = False
        self._last_sent_s = monotonic()
        self.events_endpoint = options.events_endpoint
        self.replay_endpoint = options.replay_endpoint
        self.intake_endpoint = options.intake_endpoint

    @property
    def first_replay_sequence(self) -> int:
        """Of the oldest batch that a replay can give; the next one's while there is none."""
        first = self._ring.first_sequence
        return self.stream.next_sequence if first is None else first

    def start(self, on_end: Callable[[BaseException | None], None]) -> None:
        """Raises Unavailable for an endpoint that cannot be opened."""
        self._open()
        self._thread = threading.Thread(target=self._run, args=(on_end,), name="events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the sockets are closed; what is queued for subscribers gets LINGER_MS."""
        self._stopping.set()
        if self._thread is not None:
            self._waker.send(b"")
            self._thread.join()
        for socket in (self._intake, self._pub, self._replay, self._waker, self._wake_end):
            socket.close()
        self._context.term()

    def _open(self) -> None:
        options = self._options
        for socket in (self._intake, self._replay, self._waker, self._wake_end):
            socket.linger = 0
        self._pub.linger = LINGER_MS
        self._pub.sndhwm = options.hwm
        self._intake.rcvhwm = options.max_queue_size or NO_LIMIT_QUEUE_SIZE
        self._intake.maxmsgsize = options.max_batch_bytes
        self._replay.sndhwm = REPLAY_HIGH_WATER_MESSAGES
        self._replay.router_mandatory = True
        self._wake_end.bind("inproc://wake")
        self._waker.connect("inproc://wake")
        self.intake_endpoint = _open_one(self._intake, options.intake_endpoint, SocketRole.BIND)
        self.events_endpoint = _open_one(self._pub, options.events_endpoint, options.events_role)
        if options.replay_endpoint:
            self.replay_endpoint = _open_one(self._replay, options.replay_endpoint, SocketRole.BIND)
            self._poller.register(self._replay, zmq.POLLIN)
        self._poller.register(self._intake, zmq.POLLIN)
        self._poller.register(self._wake_end, zmq.POLLIN)

    def _run(self, on_end: Callable[[BaseException | None], None]) -> None:
        try:
            self.stream.announce_start()
            while not self._stopping.is_set():
                self._turn()
        except Exception as error:
            on_end(error)
        else:
            on_end(None)

    def _turn(self) -> None:
        """Wait for something to do; intake first, then one burst for each replay."""
        ready = dict(self._poller.poll(self._patience_ms()))
        if self._intake in ready:
            self._take_in()
        if self._replay in ready:
            self._take_replay_requests()
        self._more_to_replay = self._readers.advance(now_s=monotonic())
        self._beat_if_silent()
        self._show()

    def _patience_ms(self) -> int:
        if self._more_to_replay:
            return 0
        wait_s = RETRY_FULL_READER_S if len(self._readers) else IDLE_WAKE_S
        if self._options.heartbeat_s:
            wait_s = min(wait_s, max(0.0, self._last_sent_s + self._options.heartbeat_s - monotonic()))
        return int(wait_s * 1000) + 1

    def _take_in(self) -> None:
        for _ in range(INTAKE_BURST_MESSAGES):
            try:
                frames = self._intake.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                self.stream.take_in(frames)
                self._last_sent_s = monotonic()
            except DataLoss as error:
                self._metrics.malformed.labels("intake").inc()
                self._limited.warning(self._log, "malformed event batch", problem=str(error))

    def _take_replay_requests(self) -> None:
        while True:
            try:
                frames = self._replay.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            request = parse_replay_request(frames)
            if request is None:
                self._metrics.malformed.labels("replay").inc()
                self._limited.warning(self._log, "malformed replay request", num_frames=len(frames))
                continue
            accepted = self._readers.request(request, now_s=monotonic())
            self._metrics.replays.labels("accepted" if accepted else "refused").inc()

    def _publish(self, frames: Sequence[bytes]) -> None:
        self._pub.send_multipart(frames)

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
            self._last_sent_s = now_s

    def _show(self) -> None:
        self._metrics.next_sequence.set(self.stream.next_sequence)
        self._metrics.ring_batches.set(len(self._ring))
        self._metrics.ring_bytes.set(self._ring.num_bytes)
        self._metrics.replay_readers.set(len(self._readers))


def _open_one(socket: zmq.Socket[bytes], endpoint: str, role: SocketRole) -> str:
    """The endpoint in fact opened (port 0 or * gets a number)."""
    socket.ipv6 = "[" in endpoint or "::" in endpoint
    try:
        if role is SocketRole.CONNECT:
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise Unavailable(f"cannot {role.value} {endpoint}: {error.strerror}") from error
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.decode().rstrip("\0")
