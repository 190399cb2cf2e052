"""The system that `docker compose up` started, as run.sh says in the environment."""

import json
import os
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class ComposeSystem:
    """A client of it; `http` talks to the gateway."""

    http: httpx.Client

    def chat(self, *messages: tuple[str, str], max_tokens: int = 24) -> dict[str, Any]:
        """Greedy; the whole answer. `messages`: pairs of role and content."""
        body = {
            "model": MODEL,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def metric(self, service: str, name: str, **labels: str) -> float:
        """Sum over the samples of that name whose labels are as given."""
        families = text_string_to_metric_families(self.get(service, "/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def get(self, service: str, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{port(f'{service.upper()}_METRICS_PORT')}{path}", timeout=30)

    def containers(self) -> dict[str, dict[str, Any]]:
        """What the engine says of each container, by service."""
        label = f"label=com.docker.compose.project={os.environ['COMPOSE_PROJECT_NAME']}"
        listed = _docker("ps", "--all", "--quiet", "--filter", label)
        inspected = json.loads(_docker("inspect", *listed.split()))
        return {item["Config"]["Labels"]["com.docker.compose.service"]: item for item in inspected}

    def kill(self, service: str) -> None:
        """SIGKILL from inside the container, as a crash would be; `docker kill` counts as stopped by hand."""
        restarts = self.containers()[service]["RestartCount"]
        # Process 1 is the init, which no signal from within can kill.
        script = (
            "import os, signal; from pathlib import Path;"
            "[os.kill(int(p.parent.name), signal.SIGKILL) for p in Path('/proc').glob('[0-9]*/cmdline')"
            f" if b'-m\\0reprise_{service}\\0' in p.read_bytes() and p.parent.name != '1']"
        )
        command = ["docker", "exec", self.containers()[service]["Id"], "python", "-c", script]
        # Its own end comes with the container's, so its exit status says nothing.
        subprocess.run(command, capture_output=True, check=False, timeout=60)
        deadline_s = time.monotonic() + 60
        while self.containers()[service]["RestartCount"] == restarts:
            assert time.monotonic() < deadline_s, f"{service} was not started again"
            time.sleep(0.1)


def port(variable: str) -> int:
    return int(os.environ[variable])


def _docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
