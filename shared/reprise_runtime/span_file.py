"""Finished spans as JSON lines, one file per process: what `trace_exporter=file:PATH` writes."""

from collections.abc import Iterator
from pathlib import Path

import msgspec


class SpanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Ids in hex as in a `traceparent`; times in nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str | None
    service: str
    name: str
    start_ns: int
    end_ns: int
    failed: bool = False
    attributes: dict[str, str | bool | int | float] = {}

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def read_trace(folder: Path, trace_id: str) -> list[SpanRecord]:
    """The spans of one trace in all `*.jsonl` files of the folder, earliest first.

    A line that is cut short, as the last one may be while it is written, is passed over.
    """
    found = [span for path in sorted(folder.glob("*.jsonl")) for span in _spans_of(path, trace_id)]
    return sorted(found, key=lambda span: (span.start_ns, -span.end_ns))


def _spans_of(path: Path, trace_id: str) -> Iterator[SpanRecord]:
    decoder = msgspec.json.Decoder(SpanRecord)
    wanted = trace_id.encode()
    with path.open("rb") as lines:
        for line in lines:
            if wanted not in line:
                continue
            try:
                span = decoder.decode(line)
            except msgspec.DecodeError:
                continue
            if span.trace_id == trace_id:
                yield span
