"""`reprise serve` as a user starts it: on free ports, in a folder of its own, stopped with Ctrl-C."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from support.models import smollm2_path

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 8.0
BLOCK_SIZE = 16
_PORTS_NEEDED = 60


def free_port_base() -> int:
    """A stretch of free ports; drawn at random so that runs side by side do not meet."""
    rng = random.Random()
    for _ in range(200):
        base = rng.randrange(15_000, 31_000, _PORTS_NEEDED)
        if all(_is_free(base + offset) for offset in range(_PORTS_NEEDED)):
            return base
    raise RuntimeError("no free stretch of ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@dataclass
class System:
    process: subprocess.Popen[bytes]
    folder: Path
    endpoints: dict[str, Any]
    ready_after_s: float

    @property
    def url(self) -> str:
        return str(self.endpoints["gateway"])

    def post(self, path: str, body: object, *, raw: bytes | None = None) -> tuple[int, Any]:
        """Status and parsed body, whatever the status."""
        data = json.dumps(body).encode() if raw is None else raw
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of that name whose labels are as given."""
        samples = (
            s for family in text_string_to_metric_families(self.get("/metrics")) for s in family.samples
        )
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def reset(self, *, external: bool = False, running: bool = False) -> Any:
        query = f"reset_external={str(external).lower()}&reset_running_requests={str(running).lower()}"
        status, body = self.post(f"/reset_prefix_cache?{query}", None, raw=b"")
        assert status == 200, body
        return body

    def token_ids(self, body: object) -> list[int]:
        status, answer = self.post("/tokenize", body)
        assert status == 200, answer
        return answer["tokens"]

    def child_pids(self) -> dict[str, int]:
        """Process id by service name."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except (OSError, IndexError):
                continue
            if parent == self.process.pid:
                name = next((part.decode() for part in command if part.startswith(b"reprise_")), "redis")
                found[name.removeprefix("reprise_")] = int(entry.name)
        return found

    def log(self) -> str:
        return (self.folder / "serve.log").read_text(errors="replace")

    def stop(self) -> float:
        """Ctrl-C; seconds until it had ended. Leaves no process behind."""
        started_s = time.monotonic()
        children = self.child_pids()
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        took_s = time.monotonic() - started_s
        left = [name for name, pid in children.items() if Path(f"/proc/{pid}").exists()]
        assert not left, f"still alive: {left}"
        return took_s


def start_system(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> System:
    """Waits until everything is ready. Several systems' whole pools would fill a small machine."""
    folder.mkdir(parents=True, exist_ok=True)
    ready_file = folder / "ready.json"
    command = [
        *(sys.executable, "-m", "reprise_cli", "serve", "--dev-mode"),
        *("--port-base", str(free_port_base()), "--state-dir", str(folder / "state")),
        *("--ready-file", str(ready_file), "--cache-dir", str(smollm2_path().parent), *arguments),
    ]
    started_s = time.monotonic()
    environment = {**os.environ, "REPRISE_WORKER_PREFAULT_KV": "false", **(environment or {})}
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    system = System(process, folder, {}, 0.0)
    while not ready_file.exists():
        if process.poll() is not None:
            raise AssertionError(f"serve ended with {process.returncode}:\n{system.log()}")
        if time.monotonic() - started_s > START_TIMEOUT_S:
            process.kill()
            raise AssertionError(f"not ready in {START_TIMEOUT_S} s:\n{system.log()}")
        time.sleep(0.05)
    system.endpoints = json.loads(ready_file.read_text())
    system.ready_after_s = time.monotonic() - started_s
    return system
