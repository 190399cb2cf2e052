"""Local processes: started together, restarted with back-off when they die, stopped together.

A process that ends before it was ever ready ends the start: its own last words say why. Children
run in sessions of their own, so that Ctrl-C reaches only the supervisor; on Linux the kernel ends
them should the supervisor die first.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence

from reprise_cli.serve.layout import ProcessSpec
from reprise_core.errors import RepriseError

STOP_GRACE_S = 4.0
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
STEADY_S = 30.0
"""A process that lived so long starts over with the shortest back-off."""
POLL_S = 0.1
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class StartFailed(RepriseError):
    """One clear sentence, mostly the child's own."""


class Supervisor:
    def __init__(self, specs: Sequence[ProcessSpec], *, on_ready: Callable[[str], None]) -> None:
        width = max(len(spec.name) for spec in specs)
        self._children = [
            _Child(spec, f"{spec.name:<{width}}", _COLOURS[i % len(_COLOURS)]) for i, spec in enumerate(specs)
        ]
        self._on_ready = on_ready
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self, timeout_s: float) -> None:
        """Returns when every process is ready. Raises StartFailed and leaves nothing running."""
        self._keepers = [asyncio.create_task(child.keep_alive()) for child in self._children]
        waiting = {asyncio.create_task(self._wait_ready(child)) for child in self._children}
        deadline_s = time.monotonic() + timeout_s
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if waiting and time.monotonic() > deadline_s:
                    names = ", ".join(child.unready for child in self._children if child.unready)
                    raise StartFailed(f"not ready after {timeout_s:.0f} s: {names}")
        except BaseException:
            for task in waiting:
                task.cancel()
            await self.stop()
            raise

    async def _wait_ready(self, child: "_Child") -> None:
        await child.wait_ready()
        self._on_ready(child.spec.name)

    async def stop(self) -> None:
        """Everything is gone within STOP_GRACE_S and a little."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(child.stop() for child in self._children))


class _Child:
    def __init__(self, spec: ProcessSpec, label: str, colour: int) -> None:
        self.spec = spec
        self.unready = spec.name
        """What is waited for, in words; empty once it was ready."""
        self._label = f"\x1b[{colour}m{label}\x1b[0m |" if sys.stderr.isatty() else f"{label} |"
        self._process: asyncio.subprocess.Process | None = None
        self._last_words: deque[str] = deque(maxlen=5)
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def keep_alive(self) -> None:
        failures = 0
        while True:
            started_s = time.monotonic()
            code = await self._run_once()
            if self.unready:
                words = self._last_words[-1] if self._last_words else f"ended with status {code}"
                self._failed.set_exception(StartFailed(f"{self.spec.name} did not start: {words}"))
                return
            if time.monotonic() - started_s > STEADY_S:
                failures = 0
            delay_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            failures += 1
            self._say(f"ended with status {code}; restarting in {delay_s:g} s")
            await asyncio.sleep(delay_s)

    async def _run_once(self) -> int:
        self._process = await asyncio.create_subprocess_exec(
            *self.spec.command,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self.spec.environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # a line beyond the buffer's limit
                continue
            if not line:
                break
            self._say(line.decode(errors="replace").rstrip())
        return await self._process.wait()

    def _say(self, text: str) -> None:
        if text:
            self._last_words.append(text)
            print(self._label, text, file=sys.stderr, flush=True)

    async def wait_ready(self) -> None:
        probe = _probe_http if self.spec.ready_url else _probe_tcp
        target = self.spec.ready_url or self.spec.address
        while True:
            if self._failed.done():
                self._failed.result()
            answer = await asyncio.to_thread(probe, target)
            if not answer:
                break
            self.unready = f"{self.spec.name} ({answer})"
            await asyncio.sleep(POLL_S)
        self.unready = ""

    async def stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _probe_http(url: str) -> str:
    """Empty when ready, else what is waited for."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return ""
    except urllib.error.HTTPError as error:
        return error.read(500).decode(errors="replace")
    except OSError:
        return "starting"


def _probe_tcp(address: str) -> str:
    import socket

    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1):
            return ""
    except OSError:
        return "starting"


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
