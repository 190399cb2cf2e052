"""Unit tests touch nothing outside their process: a TCP connection or listener is a mistake."""

import socket
from typing import Any, NoReturn

import pytest


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    real = {name: getattr(socket.socket, name) for name in ("connect", "connect_ex", "bind")}

    def guarded(name: str) -> Any:
        def call(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6):
                _refuse(name, address)
            return real[name](self, address)

        return call

    for name in real:
        monkeypatch.setattr(socket.socket, name, guarded(name))


def _refuse(name: str, address: object) -> NoReturn:
    raise AssertionError(f"a unit test called {name} with {address}")
