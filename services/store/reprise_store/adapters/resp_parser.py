"""Answers of Redis, block values received straight into their place.

A bulk string of more than a few KiB is read from the socket into memory that `allocate` gives (what
workers read, see shared_arena), so a block is copied once, by the kernel, and where the socket can scatter
what it reads (TLS cannot) the next one's length comes along. Everything else goes through a small line
buffer. redis-py takes it as the parser of a connection.
"""

import re
import select
from collections.abc import Callable
from time import monotonic
from typing import Any

from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse
from redis.exceptions import TimeoutError as RedisTimeoutError

LINE_BUFFER_NBYTES = 64 * 1024
HEADER_READ_NBYTES = 4096
"""Read at once while a line is expected: what follows it, of a large value, is copied once more."""
READ_AHEAD_NBYTES = 64
"""Read at once with the end of a large value: the length of the next one, and little of itself."""
_DIGITS = re.compile(rb"(?::[0-9]\r\n)*")

_parse_error: Callable[[str], Exception] = BaseParser.parse_error

Allocate = Callable[[int], memoryview | None]


class BlockParser(BaseParser):
    """RESP2. Invariant: `_buffer[_start:_stop]` was received and not yet taken.

    A bulk string of more than `max_bulk_bytes` is read, thrown away and becomes None.
    """

    def __init__(
        self, socket_read_size: int, *, allocate: Allocate, max_bulk_bytes: int, scatters: bool
    ) -> None:
        """`scatters`: the socket has `recvmsg_into`."""
        del socket_read_size  # redis-py's; ours is HEADER_READ_NBYTES
        self._allocate = allocate
        self._scatters = scatters
        self._max_bulk_bytes = max_bulk_bytes
        self._socket: Any = None
        self._buffer = bytearray(LINE_BUFFER_NBYTES)
        self._view = memoryview(self._buffer)
        self._start = self._stop = 0
        self._deadline_s: float | None = None

    def on_connect(self, connection: Any) -> None:
        self._socket = connection._sock
        self._start = self._stop = 0

    def on_disconnect(self) -> None:
        self._socket = None

    def can_read(self, timeout: float = 0) -> bool:
        """Whether something that nobody asked for is there: an old answer, or the end."""
        if self._start < self._stop or self._socket is None:
            return True
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(timeout * 1000))

    def read_response(self, disable_decoding: bool = False, timeout: Any = None) -> Any:
        """One answer; an error is returned. For what redis-py itself asks while it connects."""
        return self._read()

    def read_responses(self, count: int, timeout_s: float) -> list[Any]:
        """As many answers; errors stand among them. The time is for all of them, and checked each time the
        socket gave something: it ends at most the socket's own time-out later."""
        self._deadline_s = monotonic() + timeout_s
        answers: list[Any] = []
        try:
            while len(answers) < count:
                answers += self._digits(count - len(answers))
                if len(answers) < count:
                    answers.append(self._read())
            return answers
        finally:
            self._deadline_s = None

    def _digits(self, limit: int) -> list[int]:
        """One-digit numbers that are in the buffer: a look-up's answers are little else."""
        end = min(self._stop, self._start + 4 * limit)
        run = _DIGITS.match(self._buffer, self._start, end)
        assert run is not None
        self._start = run.end()
        return [digit - 48 for digit in self._buffer[run.start() + 1 : run.end() : 4]]

    def _read(self) -> Any:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return None if rest == b"-1" else self._bulk(int(rest))
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        if kind == b"*":
            return None if rest == b"-1" else [self._read() for _ in range(int(rest))]
        if kind == b"-":
            error = _parse_error(rest.decode("utf-8", errors="replace"))
            if isinstance(error, RedisConnectionError):
                raise error
            return error
        raise InvalidResponse(f"Protocol error: {line[:20]!r}")

    def _line(self) -> bytes:
        while True:
            end = self._buffer.find(b"\r\n", self._start, self._stop)
            if end >= 0:
                line = bytes(self._view[self._start : end])
                self._start = end + 2
                return line
            waiting = bytes(self._view[self._start : self._stop])
            self._view[: len(waiting)] = waiting
            self._start, self._stop = 0, len(waiting)
            if len(waiting) >= HEADER_READ_NBYTES:
                raise InvalidResponse(f"Protocol error: a line of more than {HEADER_READ_NBYTES} bytes")
            self._stop += self._receive([self._view[self._stop : self._stop + HEADER_READ_NBYTES]])

    def _bulk(self, nbytes: int) -> bytes | memoryview | None:
        if nbytes > self._max_bulk_bytes:
            self._skip(nbytes)
            value: bytes | memoryview | None = None
        elif nbytes <= HEADER_READ_NBYTES:
            value = bytes(self._fill(memoryview(bytearray(nbytes))))
        else:
            room = self._allocate(nbytes)
            value = self._fill(room if room is not None else memoryview(bytearray(nbytes)))
        self._line()
        return value

    def _fill(self, target: memoryview) -> memoryview:
        have = min(len(target), self._stop - self._start)
        target[:have] = self._view[self._start : self._start + have]
        self._start += have
        ahead = self._view[:READ_AHEAD_NBYTES]
        while have < len(target):  # nothing is left in the buffer
            have += self._receive([target[have:], ahead] if self._scatters else [target[have:]])
            self._start, self._stop = 0, max(0, have - len(target))
        return target

    def _skip(self, nbytes: int) -> None:
        scratch = memoryview(bytearray(LINE_BUFFER_NBYTES))
        while nbytes:
            nbytes -= len(self._fill(scratch[: min(nbytes, len(scratch))]))

    def _receive(self, targets: list[memoryview]) -> int:
        """Into the first, then the next."""
        try:
            received: int
            if self._scatters:
                received, *_ = self._socket.recvmsg_into(targets)
            else:
                received = self._socket.recv_into(targets[0])
        except TimeoutError as error:
            raise RedisTimeoutError("no answer in time") from error
        if not received:
            raise RedisConnectionError("the server closed the connection")
        if self._deadline_s is not None and monotonic() > self._deadline_s:
            raise RedisTimeoutError("the answer takes too long")
        return received
