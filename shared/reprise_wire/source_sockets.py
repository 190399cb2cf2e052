"""The sockets of one event source: live batches, what becomes of that connection, and one for each question.

A live connection that breaks is never mended by ZMQ: its socket is closed, with what it still holds, and
a new one opened, so that no batch from before the break can come after it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic

import zmq
from zmq.utils.monitor import parse_monitor_message

from reprise_core.errors import DataLoss, InvalidInput
from reprise_wire.event_codec import (
    PublishedBatch,
    parse_pub_frames,
    parse_replay_reply,
    replay_request_frames,
)
from reprise_wire.event_snapshot import (
    SnapshotRefused,
    is_snapshot_answer,
    parse_snapshot_answer,
    snapshot_request_frames,
)
from reprise_wire.event_source import EventSource
from reprise_wire.event_source_values import Ask, AskKind
from reprise_wire.zmq_frames import receive_frames

LIVE_QUEUE_BATCHES = 100_000
"""Batches that wait in the live socket; beyond it the publisher drops and a gap shows."""
ANSWER_QUEUE_BATCHES = 100_000
"""Of an answer: publishers that do not wait for their reader drop beyond it."""
RECONNECT_MS, MAX_RECONNECT_MS = 50, 2000
HANDSHAKE_MS = 10_000
"""A peer that accepts and says nothing for so long is tried again."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5000, 15_000
"""ZMQ's own, on the live connection: a peer that is gone without a word shows as a lost connection."""

_LOST = zmq.EVENT_DISCONNECTED
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)
_WATCHED = _LOST | zmq.EVENT_HANDSHAKE_SUCCEEDED | _REFUSED[0] | _REFUSED[1] | _REFUSED[2]

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
Watch = Callable[[Socket, bool], None]
"""Called with True for a socket that is to be looked at from now on, with False before it closes."""


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """CURVE keys as Z85 text of 40 characters: the publisher's public one, and ours."""

    server_public: bytes
    client_public: bytes
    client_secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """Where a publisher is; one address per data-parallel rank."""

    name: str
    endpoint: str
    replay_endpoint: str = ""
    """For replays and snapshots; empty = the publisher has none."""
    topic: str = ""
    """Prefix of the topics wanted."""
    keys: ClientKeys | None = None


class SourceSockets:
    """Raises InvalidInput for an address that cannot be one."""

    def __init__(self, context: Context, address: SourceAddress, source: EventSource, watch: Watch) -> None:
        self._context = context
        self._address = address
        self._watch = watch
        self._epoch = source.live_epoch
        self._sent: Ask | None = None
        self._questions: Socket | None = None
        self.source = source
        self.num_refused = 0
        """Handshakes that failed: a wrong key, or no ZMQ at all."""
        self._open_live()

    def close(self) -> None:
        self._close_live()
        self._close_questions()

    def pump(self, budget: int) -> bool:
        """Takes in what is there, at most `budget` messages a socket; True when there may be more."""
        more = self._pump_live(budget)
        self._send_ask()
        more = self._pump_answers(budget) or more
        now_s = monotonic()
        wake_s = self.source.wake_s
        # A time limit counts only when nothing waits to be read: this process may have been stopped.
        if not more and wake_s is not None and now_s >= wake_s:
            self.source.tick(now_s=now_s)
            self._send_ask()
        return more

    # --- live ----------------------------------------------------------------------------------

    def _pump_live(self, budget: int) -> bool:
        # What the connection has become is asked after the batches are read: so those that were read before
        # it broke are known to be, and dropped.
        messages = list(_receive(self._live, budget))
        for event in self._connection_events():
            if event == _LOST:
                self._reopen()
                return True
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.source.connected(now_s=monotonic())
            else:
                self.num_refused += 1
        now_s = monotonic()
        for frames in messages:
            try:
                message = parse_pub_frames(frames)
            except DataLoss as error:
                self.source.malformed(str(error), now_s=now_s)
                continue
            self.source.live(message, now_s=now_s)
            if self.source.live_epoch != self._epoch:
                self._reopen()
                return True
        return len(messages) == budget

    def _connection_events(self) -> Iterable[int]:
        for frames in _receive(self._monitor, 100):
            yield int(parse_monitor_message(frames)["event"])

    def _reopen(self) -> None:
        self._close_live()
        self.source.disconnected(now_s=monotonic())
        self._epoch = self.source.live_epoch
        self._open_live()

    def _open_live(self) -> None:
        socket = self._socket(zmq.SUB)
        socket.rcvhwm = LIVE_QUEUE_BATCHES
        socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS, MAX_RECONNECT_MS
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        socket.subscribe(self._address.topic)
        self._live = socket
        self._monitor: Socket = socket.get_monitor_socket(_WATCHED)
        self._connect(socket, "endpoint", self._address.endpoint)
        self._watch(self._live, True)
        self._watch(self._monitor, True)

    def _close_live(self) -> None:
        self._watch(self._live, False)
        self._watch(self._monitor, False)
        # In this order: an event without a reader would block ZMQ's own thread, and this one behind it.
        self._live.disable_monitor()
        self._monitor.close(linger=0)
        self._live.close(linger=0)

    # --- questions -----------------------------------------------------------------------------

    def _send_ask(self) -> None:
        """Every question has a socket of its own, so that answers to former ones are nobody's."""
        ask = self.source.ask
        if ask is self._sent:
            return
        self._sent = ask
        self._close_questions()
        if ask is None:
            return
        socket = self._socket(zmq.DEALER)
        socket.rcvhwm = ANSWER_QUEUE_BATCHES
        self._connect(socket, "replay_endpoint", self._address.replay_endpoint)
        is_snapshot = ask.kind is AskKind.SNAPSHOT
        socket.send_multipart(snapshot_request_frames() if is_snapshot else replay_request_frames(ask.start))
        self._questions = socket
        self._watch(socket, True)

    def _pump_answers(self, budget: int) -> bool:
        ask, socket = self._sent, self._questions
        if ask is None or socket is None:
            return False
        num_messages = 0
        for frames in _receive(socket, budget):
            num_messages += 1
            self._take_answer(ask, frames)
            if self.source.live_epoch != self._epoch:
                self._reopen()
                return True
            if self.source.ask is not ask:
                self._send_ask()
                return True
        return num_messages == budget

    def _take_answer(self, ask: Ask, frames: list[bytes]) -> None:
        now_s = monotonic()
        try:
            if ask.kind is AskKind.SNAPSHOT:
                if is_snapshot_answer(frames):
                    self.source.snapshot_part(ask.ask_id, parse_snapshot_answer(frames), now_s=now_s)
                return
            message = parse_replay_reply(frames)
            if message is None or self._is_wanted(message):
                self.source.replayed(ask.ask_id, message, now_s=now_s)
        except (DataLoss, SnapshotRefused) as error:
            self.source.ask_refused(ask.ask_id, str(error), now_s=now_s)

    def _is_wanted(self, message: PublishedBatch) -> bool:
        """Older publishers leave the topic out of replays."""
        return not message.topic or message.topic.startswith(self._address.topic)

    def _close_questions(self) -> None:
        if self._questions is not None:
            self._watch(self._questions, False)
            self._questions.close(linger=0)
            self._questions = None

    # --- both ----------------------------------------------------------------------------------

    def _socket(self, kind: int) -> Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.handshake_ivl = HANDSHAKE_MS
        keys = self._address.keys
        if keys is not None:
            socket.curve_serverkey = keys.server_public
            socket.curve_publickey, socket.curve_secretkey = keys.client_public, keys.client_secret
        return socket

    def _connect(self, socket: Socket, field_name: str, endpoint: str) -> None:
        socket.ipv6 = "[" in endpoint
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            socket.close(linger=0)
            raise InvalidInput(
                field_name, f"{endpoint!r}, {error.strerror}; must be like tcp://HOST:PORT"
            ) from error


def _receive(socket: Socket, budget: int) -> Iterable[list[bytes]]:
    for _ in range(budget):
        try:
            yield receive_frames(socket)
        except zmq.Again:
            return
