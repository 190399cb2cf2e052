"""Settings are read once, strictly: an unknown name or a bad value stops the start and lists every
problem.

A service's settings are one frozen `ServiceSettings` subclass with its env prefix
(`REPRISE_STORE_`). No field ends in `_port`: names such as REPRISE_STORE_PORT are injected by
Kubernetes for Services and are passed over.
"""

import os
import re
import sys
from typing import ClassVar, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

_KUBERNETES_NAME = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)$")


class ServiceSettings(BaseSettings):
    """What every service has; subclasses set `model_config = settings_config("store")`."""

    service: ClassVar[str]
    metrics_address: str
    """Host and port of /metrics, /healthz and /readyz."""
    log_level: str = "info"
    log_format: str = "json"
    """json, or console for people."""
    grace_period_s: float = 10.0
    """How long a stopping service may take to finish what it has."""


def settings_config(service: str) -> SettingsConfigDict:
    return SettingsConfigDict(
        env_prefix=f"REPRISE_{service.upper()}_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )


S = TypeVar("S", bound=ServiceSettings)


def load_settings(settings_class: type[S]) -> S:
    """The settings from the environment; ends the process with every problem listed."""
    problems = _unknown_names(settings_class)
    settings: S | None = None
    try:
        settings = settings_class(**{})
    except ValidationError as error:
        prefix = settings_class.model_config["env_prefix"]
        problems += [
            f"{prefix}{'_'.join(str(part) for part in item['loc']).upper()}: {item['msg']}"
            for item in error.errors()
        ]
    except SettingsError as error:  # a field that takes JSON, and the text is none
        problems.append(str(error))
    if problems or settings is None:
        for problem in problems:
            print(f"settings: {problem}", file=sys.stderr)
        raise SystemExit(2)
    return settings


def _unknown_names(settings_class: type[ServiceSettings]) -> list[str]:
    prefix = settings_class.model_config["env_prefix"]
    known = {prefix + name.upper() for name in settings_class.model_fields}
    return [
        f"{name}: unknown setting; known: {', '.join(sorted(known))}"
        for name in sorted(os.environ)
        if name.startswith(prefix) and name not in known and not _KUBERNETES_NAME.search(name)
    ]
