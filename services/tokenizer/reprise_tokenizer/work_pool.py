"""A few threads and a bounded queue in front of them."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from reprise_core.errors import Exhausted, InvalidInput
from reprise_tokenizer.metrics import TokenizerMetrics

T = TypeVar("T")


class WorkPool:
    """Runs CPU-heavy calls off the event loop. At the limit a call is refused at once, and counted."""

    def __init__(self, *, threads: int, queue_calls: int, metrics: TokenizerMetrics) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._threads = threads
        self._limit = threads + queue_calls
        self._metrics = metrics
        self._inside = 0

    async def run(self, name: str, work: Callable[[], T]) -> T:
        if self._inside >= self._limit:
            self._metrics.refused_calls.labels("queue_full").inc()
            raise Exhausted(f"{self._limit - self._threads} calls wait for the tokenizer already")
        self._change(1)
        started_s = time.monotonic()
        # The count follows the work, not the caller: a caller that went away leaves its work on a thread.
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        future.add_done_callback(lambda done: self._done(name, started_s, done))
        return await future

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _done(self, name: str, started_s: float, future: "asyncio.Future[T]") -> None:
        self._change(-1)
        if not future.cancelled() and isinstance(future.exception(), InvalidInput):
            self._metrics.refused_calls.labels("invalid").inc()
        self._metrics.call_seconds.labels(name).observe(time.monotonic() - started_s)

    def _change(self, by: int) -> None:
        self._inside += by
        self._metrics.waiting_calls.set(self._inside)
