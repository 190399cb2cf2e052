"""The reference as a peer in the same run, where `make peers` has installed it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

_SHARED = Path(__file__).parents[2]
DEFAULT_PYTHON = _SHARED.parent / ".venv-peers" / "bin" / "python"
PYTHON_VARIABLE = "REPRISE_PEERS_PYTHON"
"""Another Python that has the reference; empty = none, also where the default one is there."""


class ReferenceFailed(Exception):
    """It is installed and does not work."""


class Reference:
    """The reference in a process of its own, asked one piece of work after another.

    Waits for each answer without a limit: the work is bounded, and whoever runs a benchmark watches.
    """

    def __init__(self, python: Path) -> None:
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("reference_runner.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_SHARED)},
        )
        try:
            self.version: str = self._read()["version"]
        except ReferenceFailed:
            self.close()
            raise

    def ask(self, work: str, **command: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"work": work, **command}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ReferenceFailed("its process has ended") from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ReferenceFailed(f"its process ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def __enter__(self) -> "Reference":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def find_reference() -> Reference | None:
    """None where it is not installed, and, told on stderr, where it does not start."""
    chosen = os.environ.get(PYTHON_VARIABLE)
    python = DEFAULT_PYTHON if chosen is None else Path(chosen)
    if chosen == "" or not python.is_file():
        return None
    try:
        return Reference(python)
    except (ReferenceFailed, OSError) as error:
        print(f"the reference at {python} cannot be used: {error}", file=sys.stderr)
        return None
