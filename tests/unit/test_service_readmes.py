"""The settings tables of the services' READMEs are complete, and name nothing that is not there."""

import importlib
import re
from pathlib import Path

import pytest

from reprise_runtime.settings import ServiceSettings

SERVICES = Path(__file__).resolve().parents[2] / "services"
NAMES = ("gateway", "tokenizer", "scheduler", "worker", "store", "publisher")


def settings_class(service: str) -> type[ServiceSettings]:
    module = importlib.import_module(f"reprise_{service}.settings")
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ServiceSettings) and value is not ServiceSettings
    )


def settings_table(service: str) -> set[str]:
    text = (SERVICES / service / "README.md").read_text()
    section = re.split(r"^## ", text.split("## Settings", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    first_cells = (line.split("|")[1] for line in section.splitlines() if line.startswith("|"))
    return {name for cell in first_cells for name in re.findall(r"`([A-Z0-9_]+)`", cell)}


@pytest.mark.parametrize("service", NAMES)
def test_the_settings_table_is_right(service: str) -> None:
    fields = {name.upper() for name in settings_class(service).model_fields}
    assert settings_table(service) == fields


@pytest.mark.parametrize("service", NAMES)
def test_metrics_named_in_the_readme_exist(service: str) -> None:
    readme = (SERVICES / service / "README.md").read_text()
    source = (SERVICES / service / f"reprise_{service}" / "metrics.py").read_text()
    section = readme.split("## Metrics", 1)[1]
    named = set(re.findall(r"`(?:reprise_[a-z]+_|\.\.\._)?([a-z0-9_]+?)(?:_total)?(?:\{[^`]*\})?`", section))
    rows = [line for line in section.splitlines() if line.startswith("|")]
    names = {name for name in named if any(name in row.split("|")[1] for row in rows)}
    missing = {name for name in names if name not in source and name.partition("_")[2] not in source}
    assert names
    assert not missing
