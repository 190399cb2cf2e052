"""Followers of a publisher for tests: in this process, and as one that can be stopped by a signal.

Run as a program it is the second kind: each line on stdin is answered by a line with its report.
"""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from reprise_wire.event_facts import EventFacts, Fact
from reprise_wire.event_source_values import Delivery, Notice, SourceOptions, SourceState, plain_counters
from reprise_wire.event_subscriber import EventSubscriber
from reprise_wire.source_sockets import SourceAddress
from support.cache_workload import Truth
from support.line_server import serve_lines

NAME = "engine"
KEPT_NOTICES = 30
QUICK = SourceOptions(answer_s=2, backoff_s=0.05, max_backoff_s=0.5, retry_s=1)
REPORT_TIMEOUT_S = 60.0


def digest(copies: Mapping[tuple[int | bytes, int, str], int]) -> str:
    return hashlib.sha256(
        repr(sorted((*fact, number) for fact, number in copies.items())).encode()
    ).hexdigest()


@dataclass(frozen=True)
class Report:
    state: str
    sequence: int | None
    digest: str
    num_facts: int
    counters: dict[str, int]

    @property
    def is_exact(self) -> bool:
        return self.state == SourceState.EXACT


class Follower:
    """Follows in the loop of this process, until `stop`; `go` goes on."""

    def __init__(self, events_port: int, replay_port: int, options: SourceOptions = QUICK) -> None:
        self.facts = EventFacts()
        self.notices: list[Notice] = []
        self.last_ts = 0.0
        """Wall time of the newest batch that was delivered, as its maker says it."""
        self.subscriber = EventSubscriber(on_delivery=self._take, on_notice=self._note)
        address = SourceAddress(
            NAME, f"tcp://127.0.0.1:{events_port}", f"tcp://127.0.0.1:{replay_port}", "kv@"
        )
        self.source = self.subscriber.add(address, options)
        self._running: asyncio.Task[None] | None = None

    def go(self) -> None:
        self._running = asyncio.create_task(self.subscriber.run())

    async def stop(self) -> None:
        if self._running is not None:
            assert not self._running.done(), self._running
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None

    async def close(self) -> None:
        await self.stop()
        self.subscriber.close()

    def copies(self) -> Counter[Fact]:
        return self.facts.copies(NAME)

    def has(self, truth: Truth) -> bool:
        """Whether it holds just that; most of what it does not is seen from the number of copies."""
        return self.facts.record(NAME).num_copies == truth.total() and self.copies() == truth

    def report(self) -> Report:
        copies = self.copies()
        return Report(
            self.source.state.value,
            self.source.sequence,
            digest(copies),
            len(copies),
            plain_counters(self.source.counters),
        )

    def _take(self, delivery: Delivery) -> None:
        self.last_ts = max(self.last_ts, delivery.batch.ts)
        self.facts.apply(delivery)

    def _note(self, notice: Notice) -> None:
        self.notices.append(notice)
        del self.notices[:-KEPT_NOTICES]


class FollowerProcess:
    """The same, in a process of its own."""

    def __init__(self, events_port: int, replay_port: int, folder: Path) -> None:
        with (folder / "follower.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(events_port), str(replay_port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def report(self) -> Report:
        return await asyncio.wait_for(asyncio.to_thread(self._ask), REPORT_TIMEOUT_S)

    def _ask(self) -> Report:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("report\n")
        self._process.stdin.flush()
        return Report(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


async def _serve(events_port: int, replay_port: int) -> None:
    follower = Follower(events_port, replay_port)
    follower.go()

    async def report(line: str) -> dict[str, object]:
        return asdict(follower.report())

    await serve_lines(report)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
