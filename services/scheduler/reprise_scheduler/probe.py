"""Where a step's time goes between a worker's result and the next plan."""

import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol


class Mark(IntEnum):
    """Moments of one turn, in order."""

    RECEIVED = 0  # the result's frames were read from the socket
    DECODED = 1
    APPLIED = 2
    PLANNED = 3
    SENT = 4  # the next plan's frames were given to the socket
    PUBLISHED = 5  # the event batch too
    DELIVERED = 6  # tokens are in the gateways' outboxes
    HANDED_OVER = 7  # the last gateway's message was given to gRPC: all outboxes are empty


class Probe(Protocol):
    def mark(self, mark: Mark) -> None:
        """A turn's marks come in order; a turn without a plan lacks some. HANDED_OVER comes when the
        gateways have taken what all turns before it delivered, perhaps in a later turn."""


class OverheadProbe:
    """Keeps the time from a result to the next plan for a histogram."""

    def __init__(self, observe_s: Callable[[float], object]) -> None:
        self._observe_s = observe_s
        self._received_s = 0.0

    def mark(self, mark: Mark) -> None:
        if mark is Mark.RECEIVED:
            self._received_s = time.perf_counter()
        elif mark is Mark.SENT and self._received_s:
            self._observe_s(time.perf_counter() - self._received_s)
            self._received_s = 0.0
