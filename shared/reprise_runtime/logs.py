"""Structured logs on stderr: JSON lines, or readable lines for people. Never prompt text or secrets.

log = get_logger("worker")
log.info("worker registered", worker_id=..., num_blocks=...)
"""

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO, cast

import structlog

get_logger = structlog.stdlib.get_logger


def configure_logs(service: str, *, level: str, log_format: str) -> None:
    renderer: structlog.types.Processor = (
        structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)
        if log_format == "console"
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=cast(TextIO, _CurrentStderr())),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")


class _CurrentStderr:
    """Whatever sys.stderr is when a line is written: it may be replaced, as test runners do."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class LimitedLog:
    """Says the same kind of thing at most once per interval, with how often it was held back."""

    def __init__(self, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next_s: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def warning(self, logger: structlog.stdlib.BoundLogger, event: str, **facts: object) -> None:
        now = self._clock()
        if now < self._next_s.get(event, 0.0):
            self._held[event] = self._held.get(event, 0) + 1
            return
        self._next_s[event] = now + self._interval_s
        logger.warning(event, held_back=self._held.pop(event, 0), **facts)
