"""`reprise conformance kv-traces PATH...` and `reprise conformance pool PATH...`.

A path is a trace file, plain or gzipped, or a folder that is searched for such files; files of other
formats in a folder are passed over. A case is one trace. The last line printed is `N passed, M failed`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from reprise_cli.conformance_runner import (
    Case,
    Difference,
    Outcome,
    Row,
    Unreadable,
    failed_case,
    find_files,
    read_rows,
    run_cases,
)
from reprise_cli.kv_trace_replay import Unsupported, replay_kv_trace
from reprise_cli.pool_trace_replay import replay_pool_trace

Trace = TypeVar("Trace", Row, list[Row])


def kv_traces(paths: Sequence[str | Path]) -> int:
    """Replays key-value cache manager traces; returns the exit status."""
    return run_cases(kv_trace_cases(paths))


def pool(paths: Sequence[str | Path]) -> int:
    """Replays block pool traces; returns the exit status."""
    return run_cases(pool_cases(paths))


def kv_trace_cases(paths: Sequence[str | Path]) -> Iterator[Case]:
    return _cases(paths, _kv_cases)


def pool_cases(paths: Sequence[str | Path]) -> Iterator[Case]:
    return _cases(paths, _pool_cases)


def _cases(
    paths: Sequence[str | Path], cases_of: Callable[[str, Iterator[Row]], Iterator[Case]]
) -> Iterator[Case]:
    for path in paths:
        num_found = 0
        for file in find_files([path]):
            try:
                for case in cases_of(file.name, read_rows(file)):
                    num_found += 1
                    yield case
            except Unreadable as error:
                num_found += 1
                yield failed_case(str(file), str(error))
        if not num_found:
            yield failed_case(str(path), "holds no trace of this format")


def _kv_cases(name: str, rows: Iterator[Row]) -> Iterator[Case]:
    header = next(rows, {})
    if "header" not in header:
        return
    lines = [header, *rows]
    if len(lines) - 1 != header.get("ops"):
        problem = f"{len(lines) - 1} lines follow the header, which says {header.get('ops')}"
        yield failed_case(name, problem)
    else:
        yield Case(name, partial(_outcome, replay_kv_trace, lines))


def _pool_cases(name: str, rows: Iterator[Row]) -> Iterator[Case]:
    for row in rows:
        if row.get("kind") == "pool_trace":
            yield Case(f"{name} {row.get('id')}", partial(_outcome, replay_pool_trace, row))


def _outcome(replay: Callable[[Trace], Difference | None], trace: Trace) -> Outcome:
    try:
        return Outcome(difference=replay(trace))
    except Unsupported as reason:
        return Outcome(skipped=f"optional: {reason}, which this manager does not have")
