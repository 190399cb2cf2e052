"""Whether loading blocks takes longer than computing them, by what either took lately.

Both are straight lines through decayed measurements: seconds = fixed + seconds per unit, the units being
tokens of a step with prompts in it, or blocks of a load, each tier with a line of its own. What was not
measured often enough is not compared: then the load is allowed. A load that seems too slow is let through
every `PROBE_EVERY` times, else its tier would never be measured again and stay refused for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

DECAY = 0.9
"""Weight of a measurement when the next one has come: about the last ten count."""
MIN_STEPS = 4
MIN_LOADS = 4
PROBE_EVERY = 16

_SLOWEST_LAST = ("host", "disk", "external")


class LoadRule(StrEnum):
    """Which loads are started: every one, or those that measure as faster than computing."""

    ALWAYS = "always"
    MEASURED = "measured"


class LoadSkip(StrEnum):
    """Why blocks that the store has were not loaded."""

    SLOWER = "slower_than_compute"
    NO_ROOM = "no_room"


@dataclass(slots=True)
class Line:
    """seconds(amount) by least squares over decayed measurements; neither part is ever negative."""

    num_measured: int = 0
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def measure(self, amount: float, seconds: float) -> None:
        self.num_measured += 1
        self._weight = self._weight * DECAY + 1
        self._x = self._x * DECAY + amount
        self._y = self._y * DECAY + seconds
        self._xx = self._xx * DECAY + amount * amount
        self._xy = self._xy * DECAY + amount * seconds

    def seconds(self, amount: float) -> float:
        """Amounts that hardly differed say nothing of a fixed part: then everything is in proportion."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance < 0.01 * mean_x * mean_x:
            return mean_y / mean_x * amount
        slope = max((self._xy / self._weight - mean_x * mean_y) / variance, 0.0)
        fixed = mean_y - slope * mean_x
        return fixed + slope * amount if fixed > 0 else mean_y / mean_x * amount


@dataclass(slots=True)
class LoadCost:
    rule: LoadRule
    block_size: int
    compute: Line = field(default_factory=Line)
    loads: dict[str, Line] = field(default_factory=dict)
    _num_slow: dict[str, int] = field(default_factory=dict)

    def measure_step(self, num_tokens: int, seconds: float) -> None:
        """A step that computed parts of prompts."""
        if num_tokens > 0 and seconds > 0:
            self.compute.measure(num_tokens, seconds)

    def measure_load(self, tiers: Sequence[str], seconds: float) -> None:
        """From the plan that asked for the blocks to the report, failed ones included."""
        if tiers and seconds > 0:
            self.loads.setdefault(slowest(tiers), Line()).measure(len(tiers), seconds)

    def num_worth_loading(self, tiers: Sequence[str]) -> int:
        """How many of these blocks, from the first on: all, or those before the first of a tier that is too
        slow, or none. Counts what it refuses, so ask once per decision."""
        while tiers:
            tier = slowest(tiers)
            if not self._is_slow(tier, len(tiers)) or self._probes(tier):
                return len(tiers)
            tiers = tiers[: tiers.index(tier)]
        return 0

    def _is_slow(self, tier: str, num_blocks: int) -> bool:
        line = self.loads.get(tier)
        if self.rule is LoadRule.ALWAYS or line is None or line.num_measured < MIN_LOADS:
            return False
        if self.compute.num_measured < MIN_STEPS:
            return False
        return line.seconds(num_blocks) > self.compute.seconds(num_blocks * self.block_size)

    def _probes(self, tier: str) -> bool:
        self._num_slow[tier] = self._num_slow.get(tier, 0) + 1
        return self._num_slow[tier] % PROBE_EVERY == 0


def slowest(tiers: Sequence[str]) -> str:
    """The tier that a load of these blocks waits for. Unknown names count as slower than known ones."""
    return max(set(tiers), key=lambda tier: _SLOWEST_LAST.index(tier) if tier in _SLOWEST_LAST else 99)
