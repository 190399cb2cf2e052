"""One service as a process of its own, as an operator starts it: environment in, signals, exit code out."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

START_TIMEOUT_S = 20.0


class ServiceProcess:
    """`settings` are the service's environment names without their prefix, in lower case."""

    def __init__(self, service: str, folder: Path, *, metrics_port: int, **settings: object) -> None:
        prefix = f"REPRISE_{service.upper()}_"
        own = {prefix + name.upper(): str(value) for name, value in settings.items()}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("REPRISE_")}
        self._health = f"http://127.0.0.1:{metrics_port}"
        self.log_path = folder / f"{service}.log"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"reprise_{service}"],
                env={**inherited, f"{prefix}METRICS_ADDRESS": f"127.0.0.1:{metrics_port}", **own},
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self._process.poll() is None, self.log_path.read_text()
            try:
                with urllib.request.urlopen(f"{self._health}/readyz", timeout=1) as answer:
                    assert json.load(answer)["ready"]
                    return
            except OSError:
                assert time.monotonic() < deadline_s, self.log_path.read_text()
                time.sleep(0.05)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self._health}/metrics", timeout=5) as answer:
            text: str = answer.read().decode()
            return text

    def terminate(self, timeout_s: float = 5.0) -> int:
        """The exit code after SIGTERM; raises TimeoutExpired."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout_s)

    def wait(self, timeout_s: float = 10.0) -> int:
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
