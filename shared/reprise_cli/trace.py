"""`reprise trace`: where the time of one request went, from its own spans.

The spans come from the files of `reprise serve --trace-dir DIR`: of a prompt sent now, or of a request of
earlier, by its trace id.
"""

import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reprise_cli.chat import GatewayClient, describe
from reprise_core.errors import InvalidInput, NotFound, RepriseError
from reprise_runtime.span_file import SpanRecord, read_trace
from reprise_runtime.tracing import BUSY_S, ON_BEHALF, PHASE, Phase

WAIT_S = 5.0
"""How long the services may take to write the spans of a request that has just ended."""
_SETTLE_S = 0.3
_POLL_S = 0.05
_TRACE_ID = re.compile(r"(?:00-)?([0-9a-f]{32})(?:-[0-9a-f]{16}-[0-9a-f]{2})?")
_ORDER = {phase.value: i for i, phase in enumerate(Phase)}
GATEWAY_REST = "gateway, streams"
"""Of the request: HTTP itself, the way to the engine and back, the last text."""
ENGINE_REST = "between steps"
"""In the engine: waiting for the step's turn, planning that nothing ran beside."""


@dataclass(frozen=True, slots=True)
class Row:
    """A span, or what its parts leave out. Times in seconds, from the request's start."""

    depth: int
    name: str
    service: str
    start_s: float | None
    duration_s: float
    share: float
    """Of the request's whole time, 0 to 1."""
    phase: bool
    num_steps: int | None = None
    failed: bool = False


def trace(
    url: str,
    *,
    trace_dir: Path,
    prompt: str,
    trace_id: str = "",
    model: str = "",
    max_tokens: int = 32,
    api_key: str = "",
) -> int:
    """Sends `prompt` and shows its breakdown, or that of `trace_id` where one is given."""
    console = Console()
    try:
        if trace_id:
            spans = read_trace(trace_dir, _checked(trace_id))
        else:
            trace_id = secrets.token_hex(16)
            client = GatewayClient(url, api_key, traceparent=f"00-{trace_id}-{secrets.token_hex(8)}-01")
            answer = client.chat(
                model or client.model(),
                [{"role": "user", "content": prompt}],
                max_tokens=max_tokens,
                on_text=lambda text: None,
            )
            console.print(describe(answer), style="dim", highlight=False)
            spans = wait_for_trace(trace_dir, trace_id)
        if not spans:
            raise NotFound(
                f"no spans of trace {trace_id} in {trace_dir}; the system writes them there when it runs as"
                f" `reprise serve --trace-dir {trace_dir}`"
            )
        console.print(make_table(trace_id, breakdown(spans)))
    except (RepriseError, OSError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    return 0


def _checked(trace_id: str) -> str:
    """Also taken out of a whole `traceparent`."""
    found = _TRACE_ID.fullmatch(trace_id.strip().lower())
    if found is None:
        raise InvalidInput("trace_id", f"{trace_id!r}, must be 32 hexadecimal digits, or a traceparent")
    return found[1]


def wait_for_trace(folder: Path, trace_id: str, wait_s: float = WAIT_S) -> list[SpanRecord]:
    """Every service writes for itself: complete once the request's own span is there and no more come."""
    deadline_s = time.monotonic() + wait_s
    spans: list[SpanRecord] = []
    changed_s = time.monotonic()
    while (now_s := time.monotonic()) < deadline_s:
        found = read_trace(folder, trace_id)
        if len(found) != len(spans):
            spans, changed_s = found, now_s
        elif _has_whole_request(spans) and now_s - changed_s >= _SETTLE_S:
            break
        time.sleep(_POLL_S)
    return spans


def _has_whole_request(spans: Sequence[SpanRecord]) -> bool:
    return any(span.attributes.get(PHASE) == Phase.HTTP.value for span in spans)


def breakdown(spans: Sequence[SpanRecord]) -> list[Row]:
    """The tree of the spans, earliest first, with what they leave out.

    Nothing is counted twice in: tokenize + hash, queue, wire, model, "between steps" and "gateway,
    streams". Planning and detokenizing run beside the model, but for their first and last pieces.
    """
    known = {span.span_id for span in spans}
    children: dict[str | None, list[SpanRecord]] = {}
    for span in sorted(spans, key=lambda one: (one.start_ns, _ORDER.get(str(_phase(one)), 0))):
        children.setdefault(span.parent_id if span.parent_id in known else None, []).append(span)
    return [row for root in children.get(None, []) for row in _rows(root, root, children, 0)]


def _rows(
    span: SpanRecord, root: SpanRecord, children: Mapping[str | None, list[SpanRecord]], depth: int
) -> Iterator[Row]:
    yield _row(span, depth, root)
    below = children.get(span.span_id, [])
    for child in below:
        yield from _rows(child, root, children, depth + 1)
    rest_s = max(0.0, span.duration_s - _covered_s(below))
    phases = {_phase(child): child for child in below}
    if _phase(span) == Phase.HTTP.value:
        yield Row(depth + 1, GATEWAY_REST, span.service, None, rest_s, _share(rest_s, root), phase=False)
    elif Phase.MODEL.value in phases:
        yield Row(depth + 1, ENGINE_REST, span.service, None, rest_s, _share(rest_s, root), phase=False)


def _phase(span: SpanRecord) -> object:
    return span.attributes.get(PHASE)


def _covered_s(spans: Sequence[SpanRecord]) -> float:
    """Time in at least one of the spans; of wire and model, which take turns, the time of their pieces."""
    turns = {Phase.WIRE.value, Phase.MODEL.value}
    covered_s = sum(_busy_s(span) for span in spans if _phase(span) in turns)
    beside = turns | {Phase.PLAN.value, Phase.DETOKENIZE.value}
    end_ns = 0
    for span in sorted(spans, key=lambda one: one.start_ns):
        if _phase(span) not in beside:
            covered_s += max(0, span.end_ns - max(span.start_ns, end_ns)) / 1e9
            end_ns = max(end_ns, span.end_ns)
    return covered_s


def _row(span: SpanRecord, depth: int, root: SpanRecord) -> Row:
    num_steps = span.attributes.get("reprise.num_steps")
    return Row(
        depth=depth,
        name=span.name.removeprefix("reprise.v1."),
        service=str(span.attributes.get(ON_BEHALF, span.service)),
        start_s=(span.start_ns - root.start_ns) / 1e9,
        duration_s=_busy_s(span),
        share=_share(_busy_s(span), root),
        phase=PHASE in span.attributes,
        num_steps=int(num_steps) if num_steps is not None else None,
        failed=span.failed,
    )


def _busy_s(span: SpanRecord) -> float:
    """The time of its pieces, where the span is made of many; else its length."""
    return float(span.attributes.get(BUSY_S, span.duration_s))


def _share(duration_s: float, root: SpanRecord) -> float:
    return duration_s / root.duration_s if root.duration_s > 0 else 0.0


def make_table(trace_id: str, rows: Sequence[Row]) -> Table:
    table = Table(
        title=f"trace {trace_id}", caption="phases in bold; plan and detokenize run beside the model"
    )
    table.add_column("span", no_wrap=True)
    table.add_column("service", no_wrap=True)
    for name in ("start ms", "ms", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        steps = "" if row.num_steps is None else f" ({row.num_steps} steps)"
        label = Text("  " * row.depth + row.name + steps + (" (failed)" if row.failed else ""))
        table.add_row(
            label,
            row.service,
            "" if row.start_s is None else f"{row.start_s * 1000:.2f}",
            f"{row.duration_s * 1000:.2f}",
            f"{row.share:.1%}",
            style="bold" if row.phase else "dim",
        )
    return table
