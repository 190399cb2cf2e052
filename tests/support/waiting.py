"""Waiting for something that another task or process brings about."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # nobody sets an event for us
            await asyncio.sleep(0.01)


def until_blocking(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """The same outside an event loop. Raises TimeoutError."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(0.02)
