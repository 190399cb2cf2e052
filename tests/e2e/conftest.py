"""One running system for the stories that share it."""

from collections.abc import Iterator

import pytest

from support.system import System, start_system


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    running = start_system(tmp_path_factory.mktemp("system"))
    try:
        yield running
    finally:
        running.stop()
