"""Prefixes that are kept whatever else is evicted.

A pin holds its blocks as a request does, so no eviction order has to know of it. Pinned blocks count
as used; the limit on them is what keeps requests from starving.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from reprise_core.ids import BlockId
from reprise_scheduler.kv_cache.block_pool import BlockPool

MAX_PINS = 10_000
"""However few blocks they hold; one more is refused."""


@dataclass(frozen=True, slots=True)
class Pin:
    pin_id: int
    tenant: str
    num_tokens: int
    block_ids: tuple[BlockId, ...]
    expires_at: float | None
    """On the caller's clock, in whatever unit it passes to `expire`: seconds or steps; None = never."""


class Pins:
    """Invariant: each pin is one holder of each of its blocks; at most `max_blocks` unlike blocks are
    pinned by at most `MAX_PINS` pins, and a pin that would pass that is refused and counted.
    """

    def __init__(self, pool: BlockPool, *, max_blocks: int) -> None:
        self.num_refused = 0
        self._pool = pool
        self._max_blocks = max_blocks
        self._pins: dict[int, Pin] = {}
        self._holders: Counter[BlockId] = Counter()
        self._deadlines: list[tuple[float, int]] = []
        self._last_id = 0

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    def add(
        self, block_ids: Sequence[BlockId], *, tenant: str, num_tokens: int, expires_at: float | None
    ) -> Pin | None:
        """Pins held or cached blocks; None = the limit would be passed."""
        num_blocks = len(self._holders.keys() | set(block_ids))
        if num_blocks > self._max_blocks or len(self._pins) >= MAX_PINS:
            self.num_refused += 1
            return None
        self._last_id += 1
        pin = Pin(self._last_id, tenant, num_tokens, tuple(block_ids), expires_at)
        self._pool.touch(block_ids)
        self._holders.update(block_ids)
        self._pins[pin.pin_id] = pin
        if expires_at is not None:
            heapq.heappush(self._deadlines, (expires_at, pin.pin_id))
        return pin

    def remove(self, pin_id: int) -> bool:
        """False if there is no such pin, any more or at all."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        self._holders.subtract(pin.block_ids)
        for block_id in pin.block_ids:
            if not self._holders[block_id]:
                del self._holders[block_id]
        self._pool.give_back(pin.block_ids[::-1])
        if len(self._deadlines) > 2 * len(self._pins) + 64:  # Most are of pins that are gone.
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._pins]
            heapq.heapify(self._deadlines)
        return True

    def expire(self, now: float) -> list[Pin]:
        """Lets go of the pins whose time has come, and returns them."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, pin_id = heapq.heappop(self._deadlines)
            pin = self._pins.get(pin_id)
            if pin is not None:
                self.remove(pin_id)
                expired.append(pin)
        return expired

    def all(self) -> list[Pin]:
        """The oldest first."""
        return list(self._pins.values())

    def holds_all_used(self) -> bool:
        """Whether no block is held but by pins."""
        counts = self._pool.ref_counts
        used = self._pool.num_blocks - 1 - self._pool.num_free
        return used == len(self._holders) and all(counts[b] == n for b, n in self._holders.items())

    def add_holders(self, holders: list[int]) -> None:
        """Adds to a count of holders per block, for invariants."""
        for block_id, count in self._holders.items():
            holders[block_id] += count
