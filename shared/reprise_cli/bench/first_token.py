"""`reprise bench first-token`: time to the first token by where the prompt's blocks are.

The real model under `reprise serve`, twice: with a host tier, and with a store that has only Redis. Every
round has a prompt of its own; it is computed, then found on the device, then (after a reset of the local
cache) loaded from the store. The gateway's usage says where the blocks came from, and a round whose
blocks came from elsewhere fails. The last row is the length from which loading from Redis pays.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from reprise_cli.bench.report import BenchRow
from reprise_cli.ports import free_port_base

LENGTHS = (512, 2048, 4096)
REPEATS = 3
BLOCK_TOKENS = 16
START_TIMEOUT_S = 180.0
SAVE_TIMEOUT_S = 60.0
_PORTS = 60
_LARGEST_ID = 20_000
Seconds = dict[tuple[str, int], list[float]]


def first_token_rows(*, lengths: Sequence[int] = LENGTHS, repeats: int = REPEATS) -> list[BenchRow]:
    seconds: Seconds = {}
    for tier, environment in (("host", {}), ("external", {"REPRISE_STORE_CAPACITY_BYTES": "0"})):
        with _system(environment) as system:
            system.first_token_s(_prompt(BLOCK_TOKENS, seed=0))  # warms the model
            for number in range(1, repeats + 1):
                for length in lengths:
                    _round(system, tier, _prompt(length, seed=number * 100_000 + length), seconds)
    medians = {name: median(values) for name, values in seconds.items()}
    rows = []
    for length in lengths:
        computed_ms = 1000 * medians["recompute", length]
        rows.append(BenchRow(f"recompute {length}", computed_ms, "ms"))
        for source in ("external", "host", "local"):
            value_ms = 1000 * medians[source, length]
            case = f"{source} {length}"
            rows.append(BenchRow.lower_is_better(case, value_ms, "ms", f"recompute {length}", computed_ms))
    return [*rows, BenchRow("break-even tokens", break_even_tokens(medians, lengths), "tokens")]


def break_even_tokens(medians: Mapping[tuple[str, int], float], lengths: Sequence[int]) -> float:
    """Shortest prompt that comes sooner from Redis than from the model; at least a block.

    From the shortest length measured: beyond what a local hit takes, computing grows with the prompt, and
    the load counts as a fixed cost (it is less for less).
    """
    shortest = min(lengths)
    local_s = medians["local", shortest]
    compute_s, load_s = medians["recompute", shortest] - local_s, medians["external", shortest] - local_s
    return max(BLOCK_TOKENS, shortest * load_s / compute_s) if compute_s > 0 else float("inf")


def _round(system: "_System", tier: str, prompt: list[int], seconds: Seconds) -> None:
    length = len(prompt)
    hit_tokens = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    saved = system.saved_blocks(tier)

    def take(name: str, source: str) -> None:
        took_s, by_source = system.first_token_s(prompt)
        found = by_source.get(source, 0) if source else hit_tokens - sum(by_source.values())
        assert found >= hit_tokens, (
            f"{name} {length}: {by_source}, must be {hit_tokens} from {source or 'none'}"
        )
        seconds.setdefault((name, length), []).append(took_s)

    take("recompute", "")
    take("local", "device")
    deadline_s = time.monotonic() + SAVE_TIMEOUT_S
    while system.saved_blocks(tier) < saved + hit_tokens // BLOCK_TOKENS:
        assert time.monotonic() < deadline_s, f"the {tier} tier does not get the blocks"
        time.sleep(0.05)
    system.forget_local()
    take(tier, tier)


def _prompt(num_tokens: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, _LARGEST_ID) for _ in range(num_tokens)]


class _System:
    def __init__(self, endpoints: Mapping[str, Any]) -> None:
        self._url = endpoints["gateway"]
        self._store_metrics = endpoints["metrics"]["store"]
        self._model = self._get("/v1/models")["data"][0]["id"]

    def first_token_s(self, prompt: list[int]) -> tuple[float, dict[str, int]]:
        """Seconds to an answer of one token, and cached tokens by source."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        start_s = time.perf_counter()
        answer = self._get("/v1/completions", body)
        seconds = time.perf_counter() - start_s
        return seconds, answer["usage"]["prompt_tokens_details"].get("cached_by_source") or {}

    def forget_local(self) -> None:
        self._get("/reset_prefix_cache", {})

    def saved_blocks(self, tier: str) -> float:
        with urllib.request.urlopen(self._store_metrics, timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        labels = {"tier": tier, "outcome": "written"}
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "reprise_store_saves_total" and sample.labels == labels
        )

    def _get(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(self._url + path, data=data, headers=headers), timeout=300
        ) as answer:
            return json.loads(answer.read() or b"null")


@contextmanager
def _system(environment: Mapping[str, str]) -> Iterator[_System]:
    with tempfile.TemporaryDirectory() as folder:
        ready_file, log = Path(folder) / "ready.json", Path(folder) / "serve.log"
        command = [sys.executable, "-m", "reprise_cli", "serve", "--dev-mode"]
        command += ["--port-base", str(free_port_base(_PORTS)), "--state-dir", f"{folder}/state"]
        command += ["--ready-file", str(ready_file)]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink, env={**os.environ, **environment})
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not ready_file.exists():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"the system did not start:\n{log.read_text(errors='replace')}")
                time.sleep(0.1)
            yield _System(json.loads(ready_file.read_text()))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
