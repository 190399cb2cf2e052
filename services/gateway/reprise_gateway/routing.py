"""Which engine gets a request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from reprise_wire.clients.engine import EngineInfo


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that can serve now, with this gateway's own requests on it."""

    address: str
    info: EngineInfo
    num_inflight: int


class Router(Protocol):
    def choose(self, candidates: Sequence[Candidate], prompt_ids: Sequence[int]) -> Candidate:
        """One of `candidates`, which is not empty."""


class LeastInFlight:
    """The engine with the fewest of our requests; ties go round."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], prompt_ids: Sequence[int]) -> Candidate:
        fewest = min(candidate.num_inflight for candidate in candidates)
        tied = [candidate for candidate in candidates if candidate.num_inflight == fewest]
        self._turn += 1
        return tied[self._turn % len(tied)]
