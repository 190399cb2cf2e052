"""The block tables of all requests: what they need, adopt, take and let go."""

from collections.abc import Iterable, Sequence

from reprise_core.ids import BlockId, RequestId
from reprise_scheduler.kv_cache.block_pool import BlockPool
from reprise_scheduler.kv_cache.config import NULL_BLOCK
from reprise_scheduler.kv_cache.group import Group, ceil_div
from reprise_scheduler.kv_cache.observer import EntryObserver
from reprise_scheduler.kv_cache.request import CachedRequest, RequestBlocks

Hits = Sequence[Sequence[BlockId]]
"""Hit blocks per group."""


class BlockTables:
    """Invariants: every place of a table that is not null is one holder of its block; a table only
    grows, but places that left a window become null.
    """

    def __init__(
        self, groups: Sequence[Group], pool: BlockPool, observers: Iterable[EntryObserver] = ()
    ) -> None:
        self._groups = groups
        self._pool = pool
        self._observers = tuple(observers)
        self._requests: dict[RequestId, RequestBlocks] = {}
        self.find = self._requests.get
        """The tables of a request, or None."""

    def needed(
        self,
        state: RequestBlocks | None,
        adopted: Hits,
        num_tokens: int,
        num_computed: int,
        *,
        capped: bool = False,
    ) -> int:
        """Free blocks that holding `num_tokens` tokens costs, hit blocks that are free included.

        `capped` counts no more for a window than can be held at once.
        """
        needed = 0
        for group in self._groups:
            blocks = adopted[group.id]
            required = ceil_div(num_tokens, group.block_size)
            if capped and group.max_admission_blocks is not None:
                required = min(required, group.max_admission_blocks)
            skipped = group.skipped_tokens(num_computed) // group.block_size
            present = max(skipped, len(blocks), len(state.tables[group.id]) if state else 0)
            needed += max(required - present, 0)
            if blocks:
                needed += self._pool.count_free(blocks[skipped:])
        return needed

    def adopt(
        self, request: CachedRequest, adopted: Hits, num_computed: int, num_external_tokens: int
    ) -> RequestBlocks:
        """Starts the request's tables with the hit; then takes blocks for external tokens.

        All groups adopt before any takes: taking evicts, and a hit block may still be free.
        """
        state = self._requests[request.request_id] = RequestBlocks(len(self._groups))
        if not num_external_tokens and not any(adopted):
            return state
        for group in self._groups:
            skipped = group.skipped_tokens(num_computed) // group.block_size
            blocks = adopted[group.id][skipped:]
            for observer in self._observers:
                observer.hit(request, group, blocks)
            self._pool.touch(blocks)
            table = state.tables[group.id]
            table += [NULL_BLOCK] * skipped
            table += blocks
            state.num_cached[group.id] = len(table)
        if num_external_tokens:
            self.extend(state, num_computed)
        return state

    def extend(self, state: RequestBlocks, num_tokens: int) -> list[list[BlockId]]:
        """Takes blocks until every table has room for `num_tokens` tokens; the new ones per group."""
        taken = []
        for group in self._groups:
            table = state.tables[group.id]
            num_new = ceil_div(num_tokens, group.block_size) - len(table)
            new_blocks = self._pool.take(num_new) if num_new > 0 else []
            table += new_blocks
            taken.append(new_blocks)
        return taken

    def trim(self, state: RequestBlocks, num_tokens: int) -> None:
        """Returns blocks that nothing reads any more when `num_tokens` tokens are done."""
        for group in self._groups:
            skipped = group.skipped_tokens(num_tokens) // group.block_size
            if not skipped:
                continue
            table = state.tables[group.id]
            returned = []
            for place in range(min(skipped, len(table)) - 1, -1, -1):
                if table[place] == NULL_BLOCK:
                    break
                returned.append(table[place])
                table[place] = NULL_BLOCK
            if returned:
                self._pool.give_back(returned)

    def free(self, request_id: RequestId) -> None:
        """Each table's last block first, so that a prefix outlives its continuation."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            for table in state.tables:
                self._pool.give_back(table[::-1])

    def pop(self, request_id: RequestId) -> list[BlockId]:
        """Forgets the request but not its hold on these blocks, which are not null."""
        state = self._requests.pop(request_id, None)
        return [block_id for table in state.tables for block_id in table if block_id] if state else []

    def copies(self, request_id: RequestId) -> tuple[list[BlockId], ...]:
        state = self._requests.get(request_id)
        return tuple(map(list, state.tables)) if state else tuple([] for _ in self._groups)

    def add_holders(self, holders: list[int]) -> None:
        """Adds to a count of holders per block, for invariants."""
        for state in self._requests.values():
            assert len(state.tables) == len(self._groups)
            for table in state.tables:
                for block_id in table:
                    holders[block_id] += 1
