"""Every recorded event line: encodings, frames, replay answers, endpoint tables, settings."""

from pathlib import Path

from reprise_cli.conformance_events import check_event_row
from reprise_cli.conformance_runner import read_rows

VECTORS = Path(__file__).parent / "vectors" / "events_wire.jsonl"


def test_every_recorded_line() -> None:
    rows = list(read_rows(VECTORS))
    failures = [
        f"{row['id']}: {outcome.difference}"
        for row in rows
        if (outcome := check_event_row(row)).difference is not None
    ]
    assert not failures, "\n".join(failures[:3])
    assert len(rows) == 391
