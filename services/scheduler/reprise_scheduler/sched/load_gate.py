"""Which requests may load blocks now, so that loads starve nobody of blocks and no block is loaded twice.

A request that may not waits apart, and others that need no load pass it. Three reasons: enough loads are
under way; the blocks that loads fill, or have filled for requests that still wait, take up their share of
the pool; or a block of its load is being loaded for another request already, and will be hit.
"""

from collections.abc import Sequence

from reprise_core.ids import BlockHash
from reprise_scheduler.sched.request import Request


class LoadGate:
    """Invariants: `limit_blocks` bounds the sum of what is held, unless one request alone holds more (its
    load began when nobody ran, or its local hit became shorter); while requests are deferred something is
    loading or held, so that somebody lets them try again."""

    def __init__(self, *, limit_blocks: int, max_loads: int) -> None:
        self.limit_blocks = limit_blocks
        self.deferred: dict[int, Request] = {}
        """By sequence."""
        self._max_loads = max_loads
        self._held: dict[int, int] = {}
        """Blocks by sequence, of requests that load or wait after their load."""
        self._loading: dict[int, Sequence[BlockHash]] = {}
        self._filling: set[BlockHash] = set()

    @property
    def num_held_blocks(self) -> int:
        return sum(self._held.values())

    @property
    def num_loading_blocks(self) -> int:
        return sum(self._held[sequence] for sequence in self._loading)

    @property
    def num_loaded(self) -> int:
        """Requests whose load is done and who wait to run."""
        return len(self._held) - len(self._loading)

    def admits(self, block_hashes: Sequence[BlockHash], num_blocks: int) -> bool:
        if len(self._loading) >= self._max_loads or not self._filling.isdisjoint(block_hashes):
            return False
        return not self._held or self.num_held_blocks + num_blocks <= self.limit_blocks

    def began(self, request: Request, num_blocks: int, block_hashes: Sequence[BlockHash]) -> None:
        """`num_blocks` counts every group's; the hashes are those of one group."""
        self._held[request.sequence] = num_blocks
        self._loading[request.sequence] = block_hashes
        self._filling.update(block_hashes)

    def ended(self, request: Request) -> list[Request]:
        """The load is over, its blocks are still held. Returns who may try again."""
        self._filling.difference_update(self._loading.pop(request.sequence, ()))
        return self._try_again()

    def let_go(self, request: Request) -> list[Request]:
        """The request waits no more, or has given its blocks back. Returns who may try again."""
        if self._held.pop(request.sequence, None) is None:
            return []
        return self._try_again() + self.ended(request)

    def _try_again(self) -> list[Request]:
        deferred, self.deferred = list(self.deferred.values()), {}
        return deferred
