"""One Redis server: connections that are kept, and round trips over them.

A connection is made in a thread, because redis-py blocks while it logs in. A round trip of few bytes runs
on the event loop, which saves it two changes of threads; one of many runs in a thread, so that no look-up
waits for its copies and several are copied at a time.
"""

import asyncio
import select
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor
from time import monotonic
from typing import Any, Protocol

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError

from reprise_store.breaker import CircuitBreaker
from reprise_store.ports import Value


class Connection(Protocol):
    """What is used of redis-py's connections, and what redis_connections adds."""

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def can_read(self) -> bool: ...

    def send_command(self, *arguments: str) -> None:
        """Blocks, as does `read_response`; both before `stop_blocking`."""

    def read_response(self) -> Any: ...

    def stop_blocking(self) -> None: ...

    def fileno(self) -> int: ...

    def send_some(self, pieces: deque[memoryview]) -> None: ...

    def responses(self, count: int) -> Generator[None, None, list[Any]]: ...


Command = tuple[bytes | Value, ...]
MAX_ON_LOOP_BYTES = 9 * 512 * 1024
"""More is copied in a thread. A worker's message of 4 MiB of blocks, with their headers, is not."""
JOINED_NBYTES = 16 * 1024
"""Shorter arguments are copied into one buffer; longer ones are sent from where they are."""


class RedisNode:
    """Each call has a connection to itself, kept for the next one."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Connection],
        threads: Executor,
        *,
        breaker: CircuitBreaker | None = None,
        follows_primary: bool = False,
    ) -> None:
        """`connect` is called in `threads`. `follows_primary`: what it reaches changes, so one that takes no
        writes is the wrong one."""
        self.name = name
        self.breaker = breaker
        self._connect = connect
        self._threads = threads
        self._follows_primary = follows_primary
        self._idle: list[Connection] = []

    async def round_trip(
        self, commands: Sequence[Command], timeout_s: float, *, num_bytes: int = 0
    ) -> list[Any]:
        """One pipeline; errors of single commands stand among the answers. Raises RedisError or OSError,
        and the connection is gone. `num_bytes`: about how many are sent and received."""
        deadline_s = monotonic() + timeout_s
        connection = self._take() or await self._open(deadline_s)
        exchange = _Exchange(connection, commands, deadline_s)
        try:
            if num_bytes <= MAX_ON_LOOP_BYTES:
                answers = await exchange.on_loop()
            else:
                answers = await exchange.in_thread(self._threads)
            if self._follows_primary and any(isinstance(answer, ReadOnlyError) for answer in answers):
                raise RedisConnectionError("this server is the primary no more")
        except BaseException:
            exchange.give_up()
            self.forget_connections()  # what broke this one may have broken them
            raise
        self._idle.append(connection)
        return answers

    def forget_connections(self) -> None:
        """Closes those that nobody uses."""
        while self._idle:
            self._idle.pop().disconnect()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.can_read():
                return connection
            connection.disconnect()  # the server went away meanwhile
        return None

    async def _open(self, deadline_s: float) -> Connection:
        opening = asyncio.get_running_loop().run_in_executor(
            self._threads, _connected, self._connect, deadline_s
        )
        try:
            await asyncio.wait({opening}, timeout=deadline_s - monotonic())
        finally:
            if not opening.done():
                opening.add_done_callback(_discard)
        if not opening.done():
            raise RedisTimeoutError("no connection in time")
        return opening.result()


class _Exchange:
    """One pipeline on one connection."""

    def __init__(self, connection: Connection, commands: Sequence[Command], deadline_s: float) -> None:
        self._connection = connection
        self._to_send = deque(memoryview(piece) for piece in pack(commands))
        self._reading = connection.responses(len(commands))
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[list[Any]] = self._loop.create_future()
        self._in_thread: asyncio.Future[list[Any]] | None = None

    async def on_loop(self) -> list[Any]:
        fd = self._connection.fileno()
        self._connection.send_some(self._to_send)
        self._loop.add_reader(fd, self._read)
        if self._to_send:
            self._loop.add_writer(fd, self._write)
        timer = self._loop.call_later(self._deadline_s - monotonic(), self._fail, _too_late())
        try:
            return await self._done
        finally:
            timer.cancel()
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)

    async def in_thread(self, threads: Executor) -> list[Any]:
        self._in_thread = self._loop.run_in_executor(threads, self._run)
        return await asyncio.shield(self._in_thread)

    def give_up(self) -> None:
        """Closes the connection, once no thread uses it."""
        if self._in_thread is None or self._in_thread.done():
            self._connection.disconnect()
        else:
            self._in_thread.add_done_callback(self._thread_ended)

    def _thread_ended(self, in_thread: "asyncio.Future[list[Any]]") -> None:
        self._connection.disconnect()
        if not in_thread.cancelled():
            in_thread.exception()  # nobody else asks for it

    def _run(self) -> list[Any]:
        poller = select.poll()
        while True:
            self._connection.send_some(self._to_send)
            poller.register(self._connection, select.POLLIN | (select.POLLOUT if self._to_send else 0))
            left_s = self._deadline_s - monotonic()
            if left_s <= 0 or not poller.poll(left_s * 1000):
                raise _too_late()
            try:
                next(self._reading)
            except StopIteration as end:
                answers: list[Any] = end.value
                return answers

    def _write(self) -> None:
        try:
            self._connection.send_some(self._to_send)
        except Exception as error:
            self._fail(error)
            return
        if not self._to_send:
            self._loop.remove_writer(self._connection.fileno())

    def _read(self) -> None:
        try:
            next(self._reading)
        except StopIteration as end:
            if not self._done.done():
                self._done.set_result(end.value)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)


def _too_late() -> RedisTimeoutError:
    return RedisTimeoutError("the round trip takes too long")


def _connected(connect: Callable[[], Connection], deadline_s: float) -> Connection:
    if monotonic() > deadline_s:
        raise RedisTimeoutError("no thread in time")
    connection = connect()
    try:
        connection.connect()
        connection.stop_blocking()
    except BaseException:
        connection.disconnect()
        raise
    return connection


def _discard(opening: "asyncio.Future[Connection]") -> None:
    """Of a connection that came when nobody waited for it any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().disconnect()


def pack(commands: Sequence[Command]) -> list[Value]:
    """RESP; long arguments are not copied."""
    pieces: list[Value] = []
    joined = bytearray()
    for command in commands:
        joined += b"*%d\r\n" % len(command)
        for argument in command:
            nbytes = len(argument)
            if nbytes <= JOINED_NBYTES:
                joined += b"$%d\r\n%b\r\n" % (nbytes, bytes(argument))
                continue
            joined += b"$%d\r\n" % nbytes
            pieces += [bytes(joined), argument]
            joined = bytearray(b"\r\n")
    return [*pieces, bytes(joined)]
