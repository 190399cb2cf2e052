"""A ZMQ DEALER with a thread of its own: the part that both links share.

Only this thread touches the socket. Others leave work where the subclass finds it and call `wake`.
Sends never wait; with ZMQ_IMMEDIATE a message for an absent peer is refused instead of queued.
"""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

_MAX_FRAMES_PER_TURN = 64
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 10_000
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000


class DealerThread:
    """Subclasses implement `on_frames`, `on_connection` and `on_turn`, all called on the thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        name: str,
        max_message_bytes: int,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._max_message_bytes = max_message_bytes
        self._on_fatal = on_fatal
        self._stopping = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._socket: zmq.Socket[bytes]
        self._poller = zmq.Poller()
        self._watched: dict[int, Callable[[], None]] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended and its socket is closed."""
        self._stopping.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def wake(self) -> None:
        """Makes the thread take its next turn now; any thread may call it."""
        with contextlib.suppress(BlockingIOError):  # it is awake already
            os.write(self._wake_write, b"\0")

    def watch(self, fd: int, on_ready: Callable[[], None]) -> None:
        """On the thread only: has `on_ready` called while the descriptor has something to read."""
        self._watched[fd] = on_ready
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Before it is closed."""
        del self._watched[fd]
        self._poller.unregister(fd)

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        """On the thread only; False when the peer is away or its queue is full."""
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def on_frames(self, frames: list[zmq.Frame]) -> None:
        raise NotImplementedError

    def on_connection(self, connected: bool) -> None:
        raise NotImplementedError

    def on_turn(self) -> float:
        """Sends what there is to send; answers in how many seconds it wants its next turn."""
        raise NotImplementedError

    def _live(self) -> None:
        try:
            self._socket = self._context.socket(zmq.DEALER)
            try:
                self._serve()
            finally:
                self._socket.close(linger=0)
        except BaseException as error:
            self._on_fatal(error)

    def _serve(self) -> None:
        socket = self._socket
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        # A peer that vanished without closing (its machine, its address) is noticed, and its name is
        # resolved again.
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(self._endpoint)
            self._take_turns(monitor)
        finally:
            # In this order: an event without a reader would block ZMQ's own thread, and this one behind it.
            socket.disable_monitor()
            monitor.close(linger=0)

    def _take_turns(self, monitor: zmq.Socket[bytes]) -> None:
        for source in (self._socket, monitor, self._wake_read):
            self._poller.register(source, zmq.POLLIN)
        while not self._stopping.is_set():
            wait_s = self.on_turn()
            ready = dict(self._poller.poll(max(0, math.ceil(wait_s * 1000))))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if monitor in ready:
                self._receive_connections(monitor)
            for fd in self._watched.keys() & ready.keys():
                self._watched[fd]()
            self._receive_frames()

    def _receive_connections(self, monitor: zmq.Socket[bytes]) -> None:
        while monitor.poll(0):
            event = recv_monitor_message(monitor)["event"]
            self.on_connection(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def _receive_frames(self) -> None:
        for _ in range(_MAX_FRAMES_PER_TURN):
            # Asking is cheaper than to be told Again, which may be said all the same: a peer has left.
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            try:
                frames = self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self.on_frames(frames)
