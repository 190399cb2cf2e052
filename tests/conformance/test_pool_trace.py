"""The recorded block pool runs: one full-attention group, default hashing."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from reprise_cli.conformance_kv import pool, pool_cases
from reprise_cli.pool_trace_replay import replay_pool_trace

VECTORS = Path(__file__).parent / "vectors" / "pool_trace.jsonl"
CASES = list(pool_cases([VECTORS]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_recording(case: Any) -> None:
    outcome = case.run()
    assert outcome.difference is None, str(outcome.difference)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert pool([str(VECTORS)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "24 passed, 0 failed"


@pytest.mark.parametrize("name", ["events", "free_queue", "ref_counts", "hashed_blocks", "usage", "stats"])
def test_a_changed_field_is_found(name: str) -> None:
    with VECTORS.open(encoding="utf-8") as lines:
        trace = copy.deepcopy(json.loads(next(lines)))
    line = next(line for line in trace["ops"] if line["op"] == "admit" and name in line)
    line[name] = None
    difference = replay_pool_trace(trace)
    assert difference is not None
    assert difference.field == name
