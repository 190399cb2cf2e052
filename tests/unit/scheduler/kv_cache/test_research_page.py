"""The policy that docs/research.md builds runs as printed there, and gives the figures printed there."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reprise_cli.__main__ import app
from reprise_cli.bench.eviction import eviction

PAGE = Path(__file__).resolve().parents[4] / "docs" / "research.md"


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "policy_of_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return "policy_of_the_page:Segmented"


def test_the_policy_beats_least_recently_used_by_what_the_page_says(policy: str) -> None:
    lru, segmented = eviction([policy])
    printed = dict(re.findall(r"\| (\w+) \| (\d+\.\d\d) \|", PAGE.read_text()))
    assert printed == {row.case: f"{row.value:.2f}" for row in (lru, segmented)}
    assert segmented.ratio is not None
    assert segmented.ratio > 1.1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eviction", "--policy", "nowhere:Policy"], "nowhere"),
        (["eviction", "--policy", "segmented"], "module:Class"),
        (["hashing", "--policy", "a:B"], "eviction"),
    ],
)
def test_a_policy_that_cannot_be_used_is_named(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert words in result.output
