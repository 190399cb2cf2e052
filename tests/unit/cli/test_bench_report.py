import json

import pytest

from reprise_cli.bench import hashing
from reprise_cli.bench.reference import PYTHON_VARIABLE
from reprise_cli.bench.report import BenchRow, as_json, as_table, interleaved_medians, print_report
from reprise_core.hash_algorithms import HashAlgorithm

ROWS = [
    BenchRow.higher_is_better("fast", 12_345.6, "tokens/s", "peer", 1000.0),
    BenchRow.lower_is_better("slow", 2.0, "ms", "peer", 1.0),
    BenchRow.higher_is_better("alone", 0.5, "GB/s"),
]


def test_a_ratio_above_1_is_better_either_way() -> None:
    assert [row.ratio for row in ROWS] == [pytest.approx(12.3456), 0.5, None]


def test_json_is_one_object_with_null_where_there_is_no_peer() -> None:
    report = json.loads(as_json("name", ROWS))
    assert list(report) == ["bench", "machine", "rows"]
    assert report["bench"] == "name"
    assert report["machine"]["cpus"] >= 1
    assert report["rows"][2] == {
        "case": "alone",
        "value": 0.5,
        "unit": "GB/s",
        "peer": "",
        "peer_value": None,
        "ratio": None,
    }


def test_the_table_has_a_line_per_row() -> None:
    lines = as_table("name", ROWS).splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert lines[1].split() == ["case", "value", "unit", "peer", "peer", "value", "ratio"]
    assert lines[2].split() == ["fast", "12,346", "tokens/s", "peer", "1,000", "12.3"]
    assert lines[4].endswith("-")


def test_either_form_is_printed() -> None:
    printed: list[str] = []
    print_report("name", ROWS, echo=printed.append)
    print_report("name", ROWS, json_output=True, echo=printed.append)
    assert printed[0].startswith("name on ")
    assert json.loads(printed[1])["bench"] == "name"


def test_repeats_are_interleaved_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    now = [0.0]

    def cost(name: str, seconds: list[float]) -> None:
        calls.append(name)
        now[0] += seconds.pop(0)

    a, b = [100.0, 1.0, 2.0, 9.0], [100.0, 4.0, 4.0, 4.0]
    medians = interleaved_medians(
        {"a": lambda: cost("a", a), "b": lambda: cost("b", b)}, repeats=3, clock=lambda: now[0]
    )
    assert medians == {"a": 2.0, "b": 4.0}
    assert calls == ["a", "b"] * 4


def test_what_measures_itself_takes_its_turn_too() -> None:
    turns: list[str] = []
    told = [50.0, 2.0, 3.0, 4.0]

    def measure() -> float:
        turns.append("peer")
        return told.pop(0)

    medians = interleaved_medians(
        {"ours": lambda: turns.append("ours")}, repeats=3, clock=lambda: 0.0, measured={"peer": measure}
    )
    assert medians == {"ours": 0.0, "peer": 3.0}
    assert turns == ["ours", "peer"] * 4


def test_hashing_benches_have_a_case_per_algorithm_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "")
    monkeypatch.setattr(hashing, "PROMPT_TOKENS", (64,))
    monkeypatch.setattr(hashing, "TOKENS_PER_CALL", 640)
    monkeypatch.setattr(hashing, "APPENDED_TOKENS", 64)
    for rows in (hashing.hashing_rows(repeats=1), hashing.hashing_limit_rows(repeats=1)):
        cases = [row.case for row in rows if not row.case.endswith(" accelerated")]
        assert cases == [f"{algorithm} prompt 64" for algorithm in HashAlgorithm]
        assert all(row.ratio is not None and row.unit == "tokens/s" for row in rows)
    appended = hashing.hashing_append_rows(repeats=1)
    assert {row.case.split(" append")[0] for row in appended} == set(HashAlgorithm)
