"""Stop strings in text that comes piece by piece."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    stop: str
    text: str
    """What is still to be given out, up to the match, or to its end if it is wanted."""


class StopFinder:
    """Holds back what may become a stop string, and no more.

    Invariants: the held text is the longest end of the text so far that begins a stop string without
    being one; with `include` nothing is held, since a match would be given out anyway.
    """

    __slots__ = ("_held", "_include", "_longest", "_recent", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        # With `include`: the last characters given out, where a match may have begun.
        self._recent = ""

    def feed(self, piece: str, *, searching: bool = True) -> str | StopMatch:
        """The text that can be given out now, or the match that ends the request.

        The match that begins first counts; of two that begin together, the one listed first. With
        `searching` false a match that ends within the piece does not count.
        """
        if not self._stops:
            return piece
        before = self._recent if self._include else self._held
        text = before + piece
        if searching and piece:
            found = self._find(text, len(before))
            if found is not None:
                start, stop = found
                end = start + len(stop) if self._include else start
                return StopMatch(stop, text[len(before) : end] if self._include else text[:end])
        if self._include:
            self._recent = text[-(self._longest - 1) :] if self._longest > 1 else ""
            return piece
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """No more text will come."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_old: int) -> tuple[int, str] | None:
        """The first match that ends in new text."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or start < best[0]):
                best = (start, stop)
        return best

    def _num_held(self, text: str) -> int:
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stops):
                return size
        return 0
