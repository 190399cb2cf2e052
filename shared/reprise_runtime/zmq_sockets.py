"""ZMQ on the event loop, without threads and without a task per message."""

import asyncio
from collections.abc import Callable

import zmq

from reprise_core.errors import Unavailable

Handler = Callable[[list[bytes]], None]


class SocketReader:
    """Calls `on_message` for every multipart message of a socket.

    The file descriptor of a ZMQ socket is edge-triggered: it is read until nothing is left, and
    looked at again after every send (`kick`). At most `max_burst` messages are handled before other
    work of the loop has its turn.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", on_message: Handler, *, max_burst: int = 64) -> None:
        self._socket = socket
        self._on_message = on_message
        self._max_burst = max_burst
        self._file_descriptor = int(socket.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._file_descriptor, self._drain)
        self.kick()

    def kick(self) -> None:
        if self._loop is not None:
            self._loop.call_soon(self._drain)

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._file_descriptor)
            self._loop = None

    def _drain(self) -> None:
        for _ in range(self._max_burst):
            if self._loop is None:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(frames)
        self.kick()


def bind(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Raises Unavailable naming the endpoint when it cannot be bound."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise Unavailable(f"cannot bind {endpoint}: {error.strerror}") from error
