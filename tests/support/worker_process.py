"""A worker as its own process, as the supervisor starts it."""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType

from support.valkey_server import free_port


class WorkerProcess:
    """Settings by name; ends the process on exit. Its stderr is in `log`."""

    def __init__(self, folder: Path, scratch: Path, **settings: object) -> None:
        self.metrics_address = f"127.0.0.1:{free_port()}"
        chosen = {
            "model_path": folder,
            "metrics_address": self.metrics_address,
            "store_endpoint": "",
            "num_threads": 1,
            **settings,
        }
        names = {f"REPRISE_WORKER_{name.upper()}": str(value) for name, value in chosen.items()}
        self.log = scratch / "worker.log"
        with self.log.open("wb") as sink:
            command = [sys.executable, "-m", "reprise_worker"]
            self.process = subprocess.Popen(command, env={**os.environ, **names}, stderr=sink)

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.log.read_text())
        self.process.kill()
        self.process.wait()

    def terminate(self, timeout_s: float = 10.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.metrics_address}{path}", timeout=10) as answer:
            text: str = answer.read().decode()
            return text
