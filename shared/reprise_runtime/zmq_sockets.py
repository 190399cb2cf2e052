"""ZMQ on the event loop, without threads and without a task per message."""

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

from reprise_core.errors import Unavailable

Handler = Callable[[list[Any]], None]
"""Gets the frames: bytes, or zmq.Frame from a reader that does not copy."""


class SocketReader:
    """Calls `on_message` for every multipart message of a socket, one at a time.

    Between two messages whatever else is ready has its turn: what the message woke, then what input
    that had arrived wakes. Otherwise a peer that answers at once would keep all others waiting. The
    file descriptor of a ZMQ socket is edge-triggered: it is read until nothing is left, and looked at
    again after every send (`kick`).

    A handler that needs time says `pause`: what comes then waits in ZMQ's queue until `resume`.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", on_message: Handler, *, copy: bool = True) -> None:
        self._socket = socket
        self._on_message = on_message
        self._copy = copy
        self._paused = False
        self._file_descriptor = int(socket.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._file_descriptor, self._on_readable)
        self.kick()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self.kick()

    def kick(self) -> None:
        if self._loop is not None and not self._scheduled and self._may_read():
            self._scheduled = True
            # Two turns of the loop: in the first, input is polled; in the second, what it wakes runs.
            self._loop.call_soon(self._loop.call_soon, self._read)

    def _on_readable(self) -> None:
        # When scheduled, a message was just handled, or the socket is looked at soon.
        if not self._scheduled and self._may_read():
            self._scheduled = True
            self._read()

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._file_descriptor)
            self._loop = None

    def _read(self) -> None:
        # Still `_scheduled`: a send by the handler must not put the next read before what it wakes.
        try:
            frames = self._receive()
            if frames is not None:
                self._on_message(frames)
        finally:
            self._scheduled = False
            self.kick()

    def _receive(self) -> list[Any] | None:
        if self._loop is None or self._paused:
            return None
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=self._copy)
        except zmq.Again:  # its peer left meanwhile
            return None

    def _may_read(self) -> bool:
        """Asking is cheaper than to be told Again, and takes back the descriptor's signal, so that one that
        is paused is quiet."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN) and not self._paused


def bind(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    """The endpoint in fact bound (port 0 or * gets a number). Raises Unavailable naming the endpoint when it
    cannot be bound."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise Unavailable(f"cannot bind {endpoint}: {error.strerror}") from error
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.decode().rstrip("\0")
