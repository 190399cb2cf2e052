"""The system on Docker, for the tests that need it."""

import os
from collections.abc import Iterator

import httpx
import pytest

from compose.docker_system import ComposeSystem, port


@pytest.fixture(scope="session")
def system() -> Iterator[ComposeSystem]:
    if os.environ.get("REPRISE_COMPOSE_TEST") != "1":
        pytest.skip("needs the system on a Docker engine: make test-compose")
    with httpx.Client(base_url=f"http://127.0.0.1:{port('HTTP_PORT')}", timeout=120) as http:
        yield ComposeSystem(http)
