"""Ports for a service that is killed and started again on them.

A free port that nobody listens on for a while is soon somebody's: the kernel gives it to the next outgoing
connection, even to one that tries to reach this very port.
"""

import socket


class KeptPort:
    """Kept by a socket that is bound and does not listen, beside which one that does may be bound."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()
