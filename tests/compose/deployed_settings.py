"""The settings that images, compose file and chart give to services, held against the services themselves.

python tests/compose/deployed_settings.py RENDERED.yaml      (the chart, as `helm template` writes it)
"""

import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import yaml  # type: ignore[import-untyped]

from reprise_runtime.settings import ServiceSettings, load_settings

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "store", "publisher")
_STAGE = re.compile(r"^FROM \S+ AS (\S+)$")
_ASSIGNMENT = re.compile(r"\b(REPRISE_\w+)=(\S+)")
_VARIABLE = re.compile(r"\$\{\w+:-([^}]*)\}")


def settings_of(service: str, environment: Mapping[str, str]) -> ServiceSettings:
    """As the service would read them; SystemExit, with the problems on stderr, where it would not start."""
    module = importlib.import_module(f"reprise_{service}.settings")
    settings_class: type[ServiceSettings] = getattr(module, f"{service.capitalize()}Settings")
    with mock.patch.dict(os.environ, environment, clear=True):
        return load_settings(settings_class)


def image_environment(service: str) -> dict[str, str]:
    """What the Dockerfile's target sets."""
    found: dict[str, str] = {}
    stage = ""
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if match := _STAGE.match(line):
            stage = match[1]
        elif stage == service:
            found |= dict(_ASSIGNMENT.findall(line))
    return found


def compose_services() -> dict[str, Any]:
    """docker-compose.yml with every variable at its default."""
    text = _VARIABLE.sub(lambda match: match[1], (ROOT / "docker-compose.yml").read_text())
    return dict(yaml.safe_load(text)["services"])


def chart_environments(rendered: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Service and environment of every container of ours; a value from a secret is left out."""
    for manifest in yaml.safe_load_all(rendered):
        if not manifest or manifest["kind"] not in ("Deployment", "StatefulSet"):
            continue
        for container in manifest["spec"]["template"]["spec"]["containers"]:
            if container["name"] in SERVICES:
                entries = [entry for entry in container["env"] if "value" in entry]
                yield container["name"], {entry["name"]: entry["value"] for entry in entries}


def main(path: str) -> int:
    found = dict(chart_environments(Path(path).read_text()))
    if set(found) != set(SERVICES):
        print(f"{path}: services {sorted(found)}, must be {sorted(SERVICES)}", file=sys.stderr)
        return 1
    for service, environment in found.items():
        settings_of(service, image_environment(service) | environment)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
