"""The version of this distribution."""

from importlib.metadata import version as distribution_version


def version() -> str:
    return distribution_version("reprise")
