"""The far end of a process that is asked over its stdin: a line in, a line of JSON out."""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable


async def serve_lines(answer: Callable[[str], Awaitable[object]]) -> None:
    """Beside whatever else runs on the loop, until the process is ended."""
    loop, asked = asyncio.get_running_loop(), asyncio.Queue[str]()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(asked.put_nowait, line)

    threading.Thread(target=read, daemon=True).start()
    while True:
        _write(json.dumps(await answer(await asked.get())).encode() + b"\n")


def _write(line: bytes) -> None:
    """A stdout without a buffer, as PYTHONUNBUFFERED makes it, loses what one call does not take."""
    while line:
        line = line[os.write(sys.stdout.fileno(), line) :]
