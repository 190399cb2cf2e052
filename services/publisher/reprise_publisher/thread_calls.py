"""Calls from other threads into the one that has the sockets."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import zmq

from reprise_core.errors import Unavailable

T = TypeVar("T")

CALL_TIMEOUT_S = 10.0
"""Longer than any turn of the sockets' thread."""


class ThreadCalls:
    """`socket` becomes readable when there is something to `run`; what is called must not raise."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._waker = context.socket(zmq.PAIR)
        self.socket = context.socket(zmq.PAIR)
        for socket in (self._waker, self.socket):
            socket.linger = 0
        self.socket.bind("inproc://calls")
        self._waker.connect("inproc://calls")
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._ended = False

    def call(self, function: Callable[[], T]) -> T:
        """The answer of the other thread. Raises Unavailable when there is none."""
        future: Future[T] = Future()
        with self._lock:
            if self._ended:
                raise Unavailable("the publisher is stopping")
            self._waiting.append((future, function))
            self._waker.send(b"")
        try:
            return future.result(CALL_TIMEOUT_S)
        except TimeoutError as error:
            raise Unavailable(f"the publisher's sockets did not answer in {CALL_TIMEOUT_S} s") from error

    def wake(self) -> None:
        """Makes the other thread take a turn."""
        with self._lock:
            self._waker.send(b"")

    def run(self) -> None:
        """In the sockets' thread."""
        while self.socket.poll(0):
            self.socket.recv()
        while self._waiting:
            future, function = self._waiting.popleft()
            future.set_result(function())

    def end(self) -> None:
        """In the sockets' thread: nothing is run after this."""
        with self._lock:
            self._ended = True
            while self._waiting:
                self._waiting.popleft()[0].set_exception(Unavailable("the publisher is stopping"))

    def close(self) -> None:
        self._waker.close()
        self.socket.close()
