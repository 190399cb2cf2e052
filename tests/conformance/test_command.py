"""`reprise conformance`: what an operator sees."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reprise_cli import conformance
from reprise_cli.conformance_runner import Case, Difference, Outcome, read_rows, run_cases

VECTORS = Path(__file__).parent / "vectors"
Row = dict[str, Any]


@pytest.fixture
def chain_rows() -> list[Row]:
    rows = read_rows(VECTORS / "hashes.jsonl.gz")
    return [row for row in rows if row["kind"] == "chain" and row["hashes"]][:3]


def write_rows(path: Path, rows: list[Row], opener: Callable[..., Any] = open) -> Path:
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_all_passed(tmp_path: Path, chain_rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.hashes([write_rows(tmp_path / "a.jsonl", chain_rows)]) == 0
    assert capsys.readouterr().out == "3 passed, 0 failed\n"


def test_a_difference_is_shown_and_gives_status_1(
    tmp_path: Path, chain_rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    right = chain_rows[1]["hashes"]
    chain_rows[1]["hashes"] = ["00" * 32, *right[1:]]
    assert conformance.hashes([write_rows(tmp_path / "a.jsonl", chain_rows)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 passed, 1 failed"
    assert lines[0] == f"FAILED a.jsonl:2 {chain_rows[1]['id']} (chain)"
    assert lines[1] == "  chain: hashes"
    assert lines[2].startswith("    expected ['0000")
    assert lines[3].startswith(f"    got      ['{right[0][:4]}")


def test_a_folder_may_hold_both_kinds_of_file_and_others(
    tmp_path: Path, chain_rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "plain.jsonl", chain_rows[:1])
    (tmp_path / "deeper").mkdir()
    write_rows(tmp_path / "deeper" / "packed.jsonl.gz", chain_rows[1:], gzip.open)
    write_rows(tmp_path / "other.jsonl", [{"kind": "http", "id": "1"}])
    (tmp_path / "README.md").write_text("not a recording")
    assert conformance.hashes([tmp_path]) == 0
    assert capsys.readouterr().out == "3 passed, 0 failed\n"


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"{not json}\n", "line 1 is no JSON"),
        (b"[1]\n", "line 1 is no JSON object"),
        (b"\x1f\x8bbroken", "cannot be read"),
        (b"\xff\xfe\n", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_fails(
    tmp_path: Path, content: bytes, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    assert conformance.events([path]) == 1
    out = capsys.readouterr().out
    assert shown in out
    assert out.endswith("0 passed, 1 failed\n")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "no such kind"},
        {"algo": "md5"},
        {"block_size": 0},
        {"request": {"token_ids": ["a"]}},
        {"request": None},
        {"hashes": None},
    ],
)
def test_a_broken_row_fails_and_the_others_still_run(
    tmp_path: Path, chain_rows: list[Row], change: Row, capsys: pytest.CaptureFixture[str]
) -> None:
    chain_rows[0].update(change)
    assert conformance.hashes([write_rows(tmp_path / "a.jsonl", chain_rows)]) == 1
    assert capsys.readouterr().out.endswith("2 passed, 1 failed\n")


def test_nothing_to_run_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.events([tmp_path]) == 1
    assert capsys.readouterr().out == "no case was run\n0 passed, 0 failed\n"


def test_a_skipped_case_counts_neither_way() -> None:
    lines: list[str] = []
    cases = [Case("a", Outcome), Case("b", lambda: Outcome(skipped="no such group"))]
    assert run_cases(cases, echo=lines.append) == 0
    assert lines == ["skipped b: no such group", "1 skipped", "1 passed, 0 failed"]


def test_long_values_are_cut_around_the_difference() -> None:
    expected = list(range(1000))
    shown = str(Difference("op", "field", expected, [*expected[:900], -1]))
    assert len(shown) < 1200
    assert "899, 900" in shown
    assert "899, -1]" in shown
