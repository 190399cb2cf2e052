"""What every `reprise bench` shares: rows, interleaved repeats, the table and the JSON object."""

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

DEFAULT_REPEATS = 7


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One measured case. `ratio` above 1 is better than the peer, or is the share of a limit.

    `peer_value` and `ratio` are None where the peer is not installed.
    """

    case: str
    value: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None

    @classmethod
    def higher_is_better(
        cls, case: str, value: float, unit: str, peer: str = "", peer_value: float | None = None
    ) -> "BenchRow":
        return cls(case, value, unit, peer, peer_value, value / peer_value if peer_value else None)

    @classmethod
    def lower_is_better(
        cls, case: str, value: float, unit: str, peer: str = "", peer_value: float | None = None
    ) -> "BenchRow":
        return cls(case, value, unit, peer, peer_value, peer_value / value if peer_value and value else None)


def interleaved_medians(
    functions: Mapping[str, Callable[[], object]],
    *,
    repeats: int = DEFAULT_REPEATS,
    clock: Callable[[], float] = time.perf_counter,
    measured: Mapping[str, Callable[[], float]] | None = None,
) -> dict[str, float]:
    """Median seconds of each function, called in turn so that noise meets all of them alike.

    Those in `measured` tell their seconds themselves. One round before the first counts for nothing: it
    fills caches and tables.
    """
    measured = measured or {}
    seconds: dict[str, list[float]] = {name: [] for name in (*functions, *measured)}
    for round_number in range(repeats + 1):
        for name, function in functions.items():
            start = clock()
            function()
            if round_number:
                seconds[name].append(clock() - start)
        for name, measure in measured.items():
            taken_s = measure()
            if round_number:
                seconds[name].append(taken_s)
    return {name: median(values) for name, values in seconds.items()}


def machine() -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor_name(),
        "cpus": os.cpu_count(),
    }


def as_json(name: str, rows: Sequence[BenchRow]) -> str:
    return json.dumps({"bench": name, "machine": machine(), "rows": [asdict(row) for row in rows]})


def as_table(name: str, rows: Sequence[BenchRow]) -> str:
    """Plain text, columns as wide as their widest cell."""
    lines = [("case", "value", "unit", "peer", "peer value", "ratio")]
    lines += [
        (row.case, _number(row.value), row.unit, row.peer, _number(row.peer_value), _number(row.ratio))
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    facts = machine()
    head = f"{name} on {facts['processor']}, {facts['cpus']} CPUs, Python {facts['python']}"
    return "\n".join([head, *("  ".join(map(_padded, line, widths, _ALIGN)).rstrip() for line in lines)])


def print_report(
    name: str, rows: Sequence[BenchRow], *, json_output: bool = False, echo: Callable[[str], None] = print
) -> None:
    echo(as_json(name, rows) if json_output else as_table(name, rows))


_ALIGN = "<><<>>"


def _padded(text: str, width: int, align: str) -> str:
    return f"{text:{align}{width}}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
