"""Answers of Redis, block values received straight into their place.

A bulk string of more than a few KiB is read from the socket into memory that `allocate` gives (what
workers read, see shared_arena), so a block is copied once, by the kernel, and where the socket can scatter
what it reads (TLS cannot) the next one's length comes along. Everything else goes through a small line
buffer. redis-py takes it as the parser of a connection.

Its parts are generators that yield where a socket that does not block has nothing more to read.
"""

import re
import select
from collections.abc import Callable, Generator
from ssl import SSLWantReadError
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
MAX_TURN_NBYTES = 2 * 1024 * 1024
"""Read before the others on the event loop have their turn (some 0.4 ms)."""
_NUMBER = ord(":")
_DIGITS = re.compile(rb"(?::[0-9]\r\n)*")

_parse_error: Callable[[str], Exception] = BaseParser.parse_error

Allocate = Callable[[int], memoryview | None]
Reading = Generator[None, None, Any]


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
        self._turn_nbytes = 0

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
        """One answer of a socket that blocks; an error is returned. For what redis-py itself asks while it
        connects."""
        reading = self._read()
        while True:
            try:
                next(reading)
            except StopIteration as end:
                return end.value

    def responses(self, count: int) -> Generator[None, None, list[Any]]:
        """As many answers; errors stand among them. Yields to be resumed when there is more to read."""
        answers: list[Any] = []
        while len(answers) < count:
            if self._start < self._stop and self._buffer[self._start] == _NUMBER:
                answers += self._digits(count - len(answers))
            if len(answers) < count:
                answers.append((yield from self._read()))
        return answers

    def _digits(self, limit: int) -> list[int]:
        """One-digit numbers that are in the buffer: a look-up's answers are little else."""
        end = min(self._stop, self._start + 4 * limit)
        run = _DIGITS.match(self._buffer, self._start, end)
        assert run is not None
        self._start = run.end()
        return [digit - 48 for digit in self._buffer[run.start() + 1 : run.end() : 4]]

    def _read(self) -> Reading:
        line = yield from self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return None if rest == b"-1" else (yield from self._bulk(int(rest)))
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        if kind == b"*":
            if rest == b"-1":
                return None
            elements = []
            for _ in range(int(rest)):
                elements.append((yield from self._read()))
            return elements
        if kind == b"-":
            error = _parse_error(rest.decode("utf-8", errors="replace"))
            if isinstance(error, RedisConnectionError):
                raise error
            return error
        raise InvalidResponse(f"Protocol error: {line[:20]!r}")

    def _line(self) -> Generator[None, None, bytes]:
        while (end := self._buffer.find(b"\r\n", self._start, self._stop)) < 0:
            waiting = bytes(self._view[self._start : self._stop])
            self._view[: len(waiting)] = waiting
            self._start, self._stop = 0, len(waiting)
            if len(waiting) >= HEADER_READ_NBYTES:
                raise InvalidResponse(f"Protocol error: a line of more than {HEADER_READ_NBYTES} bytes")
            while not (received := self._receive([self._view[self._stop : self._stop + HEADER_READ_NBYTES]])):
                yield
            self._stop += received
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def _bulk(self, nbytes: int) -> Generator[None, None, bytes | memoryview | None]:
        value: bytes | memoryview | None = None
        if nbytes > self._max_bulk_bytes:
            yield from self._skip(nbytes)
        elif nbytes <= HEADER_READ_NBYTES:
            short = memoryview(bytearray(nbytes))
            yield from self._fill(short)
            value = bytes(short)
        else:
            room = self._allocate(nbytes)
            value = room if room is not None else memoryview(bytearray(nbytes))
            yield from self._fill(value)
        yield from self._line()
        return value

    def _fill(self, target: memoryview) -> Generator[None, None, None]:
        have = min(len(target), self._stop - self._start)
        target[:have] = self._view[self._start : self._start + have]
        self._start += have
        ahead = self._view[:READ_AHEAD_NBYTES]
        while have < len(target):  # nothing is left in the buffer
            received = self._receive([target[have:], ahead] if self._scatters else [target[have:]])
            if not received:
                yield
            have += received
            self._start, self._stop = 0, max(0, have - len(target))

    def _skip(self, nbytes: int) -> Generator[None, None, None]:
        scratch = memoryview(bytearray(LINE_BUFFER_NBYTES))
        while nbytes:
            part = scratch[: min(nbytes, len(scratch))]
            yield from self._fill(part)
            nbytes -= len(part)

    def _receive(self, targets: list[memoryview]) -> int:
        """Into the first, then the next. 0: nothing is there now, or it is others' turn."""
        if self._scatters and self._turn_nbytes > MAX_TURN_NBYTES:
            # Not with TLS: what it has decrypted already would wake nobody.
            self._turn_nbytes = 0
            return 0
        try:
            received: int
            if self._scatters:
                received, *_ = self._socket.recvmsg_into(targets)
            else:
                received = self._socket.recv_into(targets[0])
        except (BlockingIOError, SSLWantReadError):
            self._turn_nbytes = 0
            return 0
        except TimeoutError as error:
            raise RedisTimeoutError("no answer in time") from error
        if not received:
            raise RedisConnectionError("the server closed the connection")
        self._turn_nbytes += received
        return received
