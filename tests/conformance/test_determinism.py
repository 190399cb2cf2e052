"""Hashes do not depend on the process: 20 fresh interpreters, two hash seeds, give one value per case.

Field faults: LMCache#1139 (a random first parent per process), LMCache#2136 (an empty key slot hashed
differently per process).
"""

import os
import subprocess
import sys

import pytest

PROGRAM = """
from reprise_core.extra_keys import HashInputs
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.hash_chain import BlockHasher
from reprise_core.none_hash import none_hash, seed_text

for algorithm in HashAlgorithm:
    seed = seed_text(algorithm, None if algorithm.is_cryptographic else "0")
    hasher = BlockHasher(algorithm=algorithm, block_size=16, none_hash=none_hash(algorithm, seed))
    for inputs in (HashInputs(), HashInputs(mm=()), HashInputs(cache_salt=""), HashInputs(cache_salt="s")):
        print(algorithm, [h.hex() for h in hasher.chain(inputs).append(range(64))])
"""


@pytest.mark.parametrize("pythonhashseed", ["0", "1"])
def test_fresh_processes_agree(pythonhashseed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": pythonhashseed, "PYTHONPATH": os.pathsep.join(sys.path)}
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True, text=True
        ).stdout
        for _ in range(10)
    }
    assert len(outputs) == 1
    lines = outputs.pop().splitlines()
    assert len(lines) == 16
    for first in range(0, 16, 4):
        assert lines[first] == lines[first + 1] == lines[first + 2] != lines[first + 3]
