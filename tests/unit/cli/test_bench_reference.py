"""The reference as a peer: found, missing, broken. A stand-in speaks its lines."""

import sys
from pathlib import Path

import pytest

from reprise_cli.bench import hashing
from reprise_cli.bench.reference import PYTHON_VARIABLE, ReferenceFailed, find_reference
from reprise_core.hash_algorithms import HashAlgorithm

# Answers as the runner does, with our own hashes; a prompt of 13 tokens ends it.
STAND_IN = """
import json, random, sys
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.hash_chain import BlockHasher
print(json.dumps({"version": "9.9"}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if command["num_tokens"] == 13:
        sys.exit(3)
    count = command["num_tokens"]
    prompt = random.Random(count).choices(range(command["vocabulary"]), k=count)
    hasher = BlockHasher(algorithm=HashAlgorithm(command["algorithm"]), block_size=16,
                         none_hash=bytes.fromhex(command["none_hash"]))
    last = hasher.chain().append(prompt)[-1].hex()
    print(json.dumps({"seconds": 0.5, "count": 1, "last": last}), flush=True)
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An executable that ignores which script it is given."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/stand_in.py"\n')
    path.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(path))
    return path


def test_it_is_the_peer_where_it_is_there(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "PROMPT_TOKENS", (64,))
    monkeypatch.setattr(hashing, "TOKENS_PER_CALL", 640)
    rows = [row for row in hashing.hashing_rows(repeats=1) if "accelerated" not in row.case]
    assert {(row.peer, row.peer_value) for row in rows} == {("vLLM 9.9", 1280.0)}
    assert [row.case for row in rows] == [
        f"{algorithm} prompt 64{suffix}" for algorithm in HashAlgorithm for suffix in (" plain loop", "")
    ]


def test_one_that_ends_is_no_hang(python: Path) -> None:
    reference = find_reference()
    assert reference is not None
    with reference, pytest.raises(ReferenceFailed, match="status 3"):
        reference.ask("hash", num_tokens=13)


@pytest.mark.parametrize("content", ["#!/bin/sh\nexit 1\n", "not executable as anything\n"])
def test_one_that_does_not_start_is_told(
    python: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    python.write_text(content)
    assert find_reference() is None
    assert "cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["", "/nowhere/python"])
def test_without_it_there_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, value)
    assert find_reference() is None
