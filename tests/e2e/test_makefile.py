"""The first thing a newcomer meets when something is missing: one clear sentence."""

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("refuses", "sentence"),
    [
        ("ensurepip", "Python's venv module is missing: install the python3-venv package."),
        ("version_info", "Reprise needs Python 3.11 or newer; set PYTHON=..."),
    ],
)
def test_a_python_that_will_not_do_is_named(tmp_path: Path, refuses: str, sentence: str) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *{refuses}*) exit 1;; esac\nexit 0\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "--silent", "serve", f"PYTHON={python}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == sentence
    assert not (tmp_path / ".venv").exists()
