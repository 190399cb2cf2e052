"""`reprise conformance hashes|events PATH...`: recorded lines against our own parts.

PATH is a plain or gzipped JSON-lines file or a folder of them. The last line is
`N passed, M failed`, and the exit status is 1 on a failure. `conformance_kv` has the other two.
"""

from collections.abc import Sequence
from pathlib import Path

from reprise_cli.conformance_events import EVENT_KINDS, check_event_row
from reprise_cli.conformance_hashes import HASH_KINDS, check_hash_row
from reprise_cli.conformance_runner import (
    Case,
    Difference,
    Outcome,
    Row,
    failed_case,
    find_files,
    read_rows,
    row_cases,
    run_cases,
)

__all__ = [
    "Case",
    "Difference",
    "Outcome",
    "Row",
    "events",
    "failed_case",
    "find_files",
    "hashes",
    "read_rows",
    "row_cases",
    "run_cases",
]


def hashes(paths: Sequence[str | Path]) -> int:
    return run_cases(row_cases(paths, HASH_KINDS, check_hash_row))


def events(paths: Sequence[str | Path]) -> int:
    return run_cases(row_cases(paths, EVENT_KINDS, check_event_row))
