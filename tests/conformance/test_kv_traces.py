"""Every recorded run of the reference's KV cache manager, field by field."""

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from reprise_cli.conformance_kv import kv_trace_cases, kv_traces
from reprise_cli.kv_trace_replay import replay_kv_trace

TRACES = sorted((Path(__file__).parent / "vectors" / "kv_traces").glob("*.jsonl.gz"))
STATE_GROUPS = ("x3-", "x4-")


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.split(".")[0])
def test_equals_the_recording(path: Path) -> None:
    (case,) = kv_trace_cases([path])
    outcome = case.run()
    assert outcome.difference is None, str(outcome.difference)
    assert (outcome.skipped is not None) == path.name.startswith(STATE_GROUPS)


def test_all_letters_are_here() -> None:
    assert {path.name[0] for path in TRACES} == set("abcdefghixy")
    assert len(TRACES) == 92


def load(prefix: str) -> list[dict[str, Any]]:
    path = next(path for path in TRACES if path.name.startswith(prefix))
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("st.fq", lambda out: out["st"]["fq"].reverse()),
        ("st.rc", lambda out: out["st"]["rc"].update({"3": 7})),
        ("st.h", lambda out: out["st"]["h"].clear()),
        ("st.u", lambda out: out["st"].update(u=0.5)),
        ("st.s", lambda out: out["st"]["s"].__setitem__(0, 99)),
        ("ev", lambda out: out["ev"].clear()),
        ("nb", lambda out: out["nb"][0].append(9)),
        ("tb", lambda out: out["tb"][0].append(9)),
        ("wire", lambda out: out.update(wire="93c0c0c0")),
    ],
)
def test_a_changed_field_is_found(name: str, spoil: Any) -> None:
    """The replay compares what it says it compares."""
    lines = copy.deepcopy(load("a1-"))
    line = next(line for line in lines[1:] if line["op"] == "alloc" and "wire" in line["out"])
    spoil(line["out"])
    difference = replay_kv_trace(lines)
    assert difference is not None
    assert (difference.operation, difference.field) == (f"line {line['i']} alloc", name)


def test_command_counts_and_shows_the_first_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = load("b1-"), load("b2-")
    lookup = next(line for line in bad if line.get("op") == "lookup")
    lookup["out"]["hit"] = 12345
    (tmp_path / "good.jsonl").write_text("\n".join(map(json.dumps, good)))
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, bad)))
    (tmp_path / "cut.jsonl").write_text("\n".join(map(json.dumps, good[:-5])))
    (tmp_path / "broken.jsonl.gz").write_bytes(b"\x1f\x8bnot gzip")
    assert kv_traces([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "1 passed, 3 failed"
    assert f"line {lookup['i']} lookup: hit" in printed
    assert "expected 12345" in printed


def test_command_refuses_a_path_without_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kv_traces([str(tmp_path)]) == 1
    assert kv_traces([str(tmp_path / "missing.jsonl")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed"


def test_command_reports_what_it_skips(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(path) for path in TRACES if path.name.startswith(("x1-", "x3-"))]
    assert kv_traces(paths) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("skipped x3-")
    assert printed[-1] == "1 passed, 0 failed"


def test_only_optional_traces_may_be_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = load("x3-")
    lines[0]["optional"] = False
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert kv_traces([path]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed"
