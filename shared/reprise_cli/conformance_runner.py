"""Runs recorded cases and reports: the first difference of each failing one, then the counts."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".jsonl.gz")
MAX_SHOWN_CHARS = 400


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where we and the recording part."""

    operation: str
    field: str
    expected: object
    got: object

    def __str__(self) -> str:
        expected, got = _shown_apart(_text(self.expected), _text(self.got))
        return f"{self.operation}: {self.field}\n    expected {expected}\n    got      {got}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Passed when both fields are None."""

    difference: object = None
    """Shown with str() when the case failed."""
    skipped: str | None = None
    """Why the case cannot be run here; it counts neither as passed nor as failed."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    run: Callable[[], Outcome]


class Unreadable(Exception):
    """A file that holds no rows."""


def run_cases(cases: Iterable[Case], *, echo: Callable[[str], None] = print) -> int:
    """The exit status: 0 when at least one case passed and none failed."""
    passed = failed = skipped = 0
    for case in cases:
        outcome = _run(case)
        if outcome.skipped is not None:
            skipped += 1
            echo(f"skipped {case.name}: {outcome.skipped}")
        elif outcome.difference is None:
            passed += 1
        else:
            failed += 1
            echo(f"FAILED {case.name}\n  {outcome.difference}")
    if skipped:
        echo(f"{skipped} skipped")
    if not passed and not failed:
        echo("no case was run")
    echo(f"{passed} passed, {failed} failed")
    return 0 if passed and not failed else 1


def row_cases(
    paths: Sequence[str | Path], kinds: Iterable[str], check: Callable[[Row], Outcome]
) -> Iterator[Case]:
    """One case per row of files whose rows have a `kind`.

    In a folder, files that hold no row of these kinds are passed over, since folders mix formats.
    """
    known = frozenset(kinds)
    for path in paths:
        whole_folder = Path(path).is_dir()
        for file in find_files([path]):
            try:
                rows = list(read_rows(file))
            except Unreadable as error:
                yield failed_case(str(file), str(error))
                continue
            if whole_folder and not any(row.get("kind") in known for row in rows):
                continue
            for number, row in enumerate(rows, 1):
                yield _row_case(file, number, row, known, check)


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files themselves, and those below folders whose names end as recordings do."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found += sorted(
                file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file()
            )
        else:
            found.append(path)
    return found


def read_rows(path: Path) -> Iterator[Row]:
    """The JSON objects of a plain or gzipped file, whatever its name; raises Unreadable."""
    number = 0
    try:
        with _open_text(path) as lines:
            for line in lines:
                number += 1
                if line.strip():
                    yield _row(line, path, number)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise Unreadable(f"{path}: cannot be read after line {number}: {error}") from error


def failed_case(name: str, problem: str) -> Case:
    """A case for something that cannot even be run."""
    return Case(name, lambda: Outcome(difference=problem))


def first_difference(operation: str, pairs: Iterable[tuple[str, object, object]]) -> Outcome:
    """Compares (field, expected, got) in order."""
    for field, expected, got in pairs:
        if expected != got or type(expected) is not type(got):
            return Outcome(difference=Difference(operation, field, expected, got))
    return Outcome()


def _run(case: Case) -> Outcome:
    try:
        return case.run()
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, AssertionError) as error:
        # A row that lacks a field or holds something else than its kind should.
        return Outcome(difference=f"cannot be run: {type(error).__name__}: {error}")
    except Exception as error:
        if type(error).__module__.startswith("reprise_"):
            return Outcome(difference=f"refused: {type(error).__name__}: {error}")
        raise


def _row_case(
    file: Path, number: int, row: Row, known: frozenset[str], check: Callable[[Row], Outcome]
) -> Case:
    name = f"{file.name}:{number} {row.get('id', '')} ({row.get('kind')})"
    if row.get("kind") not in known:
        return failed_case(name, f"unknown kind {row.get('kind')!r}, must be one of {sorted(known)}")
    return Case(name, lambda: check(row))


def _open_text(path: Path) -> TextIO:
    with path.open("rb") as file:
        magic = file.read(2)
    if magic == b"\x1f\x8b":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _row(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise Unreadable(f"{path}: line {number} is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise Unreadable(f"{path}: line {number} is no JSON object")
    return row


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


def _shown_apart(expected: str, got: str) -> tuple[str, str]:
    """Both texts cut to a readable length around the place where they part."""
    if max(len(expected), len(got)) <= MAX_SHOWN_CHARS:
        return expected, got
    same = next(
        (index for index, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
        min(len(expected), len(got)),
    )
    start = max(0, same - MAX_SHOWN_CHARS // 4)
    cut = slice(start, start + MAX_SHOWN_CHARS)
    lead = "" if start == 0 else f"(from character {start}) "
    return lead + expected[cut], lead + got[cut]
