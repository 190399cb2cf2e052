"""One Redis server: connections that are kept, and round trips over them. Blocking; called in threads."""

import contextlib
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError

from reprise_store.breaker import CircuitBreaker
from reprise_store.ports import Value


class Connection(Protocol):
    """What is used of redis-py's connections, and what redis_connections adds."""

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def can_read(self) -> bool: ...

    def send_pieces(self, pieces: Sequence[Value], deadline_s: float) -> None: ...

    def read_responses(self, count: int, timeout_s: float) -> list[Any]: ...


Command = tuple[bytes | Value, ...]
JOINED_NBYTES = 16 * 1024
"""Shorter arguments are copied into one buffer; longer ones are sent from where they are."""


class RedisNode:
    """Any number of threads may call; each call has a connection to itself, kept for the next one."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Connection],
        *,
        breaker: CircuitBreaker | None = None,
        follows_primary: bool = False,
    ) -> None:
        """`follows_primary`: what `connect` reaches changes, so one that takes no writes is the wrong one."""
        self.name = name
        self.breaker = breaker
        self._connect = connect
        self._follows_primary = follows_primary
        self._idle: list[Connection] = []

    def round_trip(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        """One pipeline; errors of single commands stand among the answers. Raises RedisError or OSError,
        and the connection is gone."""
        deadline_s = monotonic() + timeout_s
        connection = self._take()
        try:
            connection.send_pieces(pack(commands), deadline_s)
            answers = connection.read_responses(len(commands), deadline_s - monotonic())
            if self._follows_primary and any(isinstance(answer, ReadOnlyError) for answer in answers):
                raise RedisConnectionError("this server is the primary no more")
        except BaseException:
            connection.disconnect()
            self.forget_connections()  # what broke this one may have broken them
            raise
        self._idle.append(connection)
        return answers

    def forget_connections(self) -> None:
        """Closes those that nobody uses."""
        with contextlib.suppress(IndexError):  # other threads take from them too
            while True:
                self._idle.pop().disconnect()

    def _take(self) -> Connection:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
                try:
                    connection.connect()
                except BaseException:
                    connection.disconnect()
                    raise
                return connection
            if not connection.can_read():
                return connection
            connection.disconnect()  # the server went away meanwhile


def pack(commands: Sequence[Command]) -> list[Value]:
    """RESP; long arguments are not copied."""
    pieces: list[Value] = []
    joined = bytearray()
    for command in commands:
        joined += b"*%d\r\n" % len(command)
        for argument in command:
            if len(argument) <= JOINED_NBYTES:
                joined += b"$%d\r\n%b\r\n" % (len(argument), bytes(argument))
                continue
            joined += b"$%d\r\n" % len(argument)
            pieces += [bytes(joined), argument]
            joined = bytearray(b"\r\n")
    return [*pieces, bytes(joined)]
