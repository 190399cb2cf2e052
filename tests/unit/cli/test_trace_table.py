"""`reprise trace`: the breakdown of one request from its spans, and how it is shown."""

from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from reprise_cli.trace import ENGINE_REST, GATEWAY_REST, Row, breakdown, make_table, trace
from reprise_runtime.span_file import SpanRecord
from reprise_runtime.tracing import BUSY_S, ON_BEHALF, PHASE, Phase

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
MS = 1_000_000


def span(name: str, parent: str | None, start_ms: int, end_ms: int, service: str, **facts) -> SpanRecord:
    phase, busy_ms = facts.pop("phase", None), facts.pop("busy_ms", None)
    attributes = {**facts}
    if phase is not None:
        attributes[PHASE] = phase.value
    if busy_ms is not None:
        attributes |= {BUSY_S: busy_ms / 1000, "reprise.num_steps": 4}
    return SpanRecord(
        trace_id=TRACE_ID,
        span_id=f"id of {name}",
        parent_id=f"id of {parent}" if parent else None,
        service=service,
        name=name,
        start_ns=start_ms * MS,
        end_ns=end_ms * MS,
        attributes=attributes,
    )


@pytest.fixture
def spans() -> list[SpanRecord]:
    """100 ms: 10 tokenizing, 80 in the engine (5 queue, 8 wire, 60 model), 10 around them."""
    return [
        span("HTTP", "the client", 1000, 1100, "gateway", phase=Phase.HTTP),
        span("tokenize + hash", "HTTP", 1002, 1012, "gateway", phase=Phase.TOKENIZE),
        span("reprise.v1.TokenizerService/Tokenize", "tokenize + hash", 1004, 1010, "tokenizer"),
        span("engine", "HTTP", 1014, 1094, "scheduler"),
        span("queue", "engine", 1014, 1019, "scheduler", phase=Phase.QUEUE),
        span("plan", "engine", 1019, 1080, "scheduler", phase=Phase.PLAN, busy_ms=3),
        span("wire", "engine", 1020, 1090, "scheduler", phase=Phase.WIRE, busy_ms=8),
        span(
            "model", "engine", 1022, 1092, "scheduler", phase=Phase.MODEL, busy_ms=60, **{ON_BEHALF: "worker"}
        ),
        span("detokenize", "HTTP", 1050, 1099, "gateway", phase=Phase.DETOKENIZE, busy_ms=7),
    ]


def by_name(rows: list[Row]) -> dict[str, Row]:
    return {row.name: row for row in rows}


def test_every_phase_has_its_start_duration_and_share(spans: list[SpanRecord]) -> None:
    rows = breakdown(list(reversed(spans)))
    assert [row.name for row in rows] == [
        "HTTP",
        "tokenize + hash",
        "TokenizerService/Tokenize",
        "engine",
        "queue",
        "plan",
        "wire",
        "model",
        ENGINE_REST,
        "detokenize",
        GATEWAY_REST,
    ]
    named = by_name(rows)
    assert {row.name for row in rows if row.phase} == {phase.value for phase in Phase}
    assert named["HTTP"].share == 1.0
    assert named["model"].start_s == pytest.approx(0.022)
    assert named["model"].duration_s == pytest.approx(0.060)
    assert named["model"].share == pytest.approx(0.6)
    assert named["model"].service == "worker"
    assert named["model"].num_steps == 4
    assert [row.depth for row in rows] == [0, 1, 2, 1, 2, 2, 2, 2, 2, 1, 1]


def test_what_does_not_overlap_adds_up_to_the_whole(spans: list[SpanRecord]) -> None:
    named = by_name(breakdown(spans))
    assert named[ENGINE_REST].duration_s == pytest.approx(0.080 - 0.005 - 0.008 - 0.060)
    assert named[GATEWAY_REST].duration_s == pytest.approx(0.100 - 0.010 - 0.080)
    parts = ("tokenize + hash", "queue", "wire", "model", ENGINE_REST, GATEWAY_REST)
    assert sum(named[name].share for name in parts) == pytest.approx(1.0)


def test_a_request_that_was_refused_has_one_row_and_its_rest() -> None:
    rows = breakdown([span("HTTP", None, 0, 2, "gateway", phase=Phase.HTTP)])
    assert [(row.name, row.share) for row in rows] == [("HTTP", 1.0), (GATEWAY_REST, 1.0)]


def test_spans_whose_parent_is_not_there_stand_on_their_own(spans: list[SpanRecord]) -> None:
    rows = breakdown([one for one in spans if one.service == "scheduler"])
    assert rows[0].name == "engine"
    assert rows[0].depth == 0


def test_the_table_fits_a_terminal(spans: list[SpanRecord]) -> None:
    console = Console(width=80, record=True, force_terminal=False)
    console.print(make_table(TRACE_ID, breakdown(spans)))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    cells = {line[0]: line[1:] for line in lines if len(line) == 5}
    assert cells["HTTP"] == ["gateway", "0.00", "100.00", "100.0%"]
    assert cells["TokenizerService/Tokenize"] == ["tokenizer", "4.00", "6.00", "6.0%"]
    assert cells["model (4 steps)"] == ["worker", "22.00", "60.00", "60.0%"]
    assert cells[GATEWAY_REST] == ["gateway", "", "10.00", "10.0%"]


def write(folder: Path, spans: list[SpanRecord]) -> None:
    for one in spans:
        with (folder / f"{one.service}.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(one) + b"\n")


@pytest.mark.parametrize("trace_id", [TRACE_ID, TRACE_ID.upper(), f"00-{TRACE_ID}-00f067aa0ba902b7-01"])
def test_an_earlier_request_by_its_id(
    spans: list[SpanRecord], trace_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, spans)
    assert trace("http://nowhere", trace_dir=tmp_path, prompt="", trace_id=trace_id) == 0
    assert "model (4 steps)" in capsys.readouterr().out


@pytest.mark.parametrize(("trace_id", "said"), [("4bf9", "32 hexadecimal digits"), ("0" * 32, "no spans")])
def test_an_id_that_is_none_or_not_there(
    trace_id: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace("http://nowhere", trace_dir=tmp_path, prompt="", trace_id=trace_id) == 1
    assert said in capsys.readouterr().out
