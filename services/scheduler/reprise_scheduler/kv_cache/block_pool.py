"""The blocks of all groups: who holds them, which hash entries they have, which are free.

An entry is a block hash in a group. A block has at most one *own* entry and any number of
*additional* ones; all are of the group whose tables hold the block. Only prompt tails, in groups
whose blocks are larger than a hash block, give a block more than one entry.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from reprise_core.ids import BlockHash, BlockId, GroupId
from reprise_scheduler.kv_cache.config import NULL_BLOCK
from reprise_scheduler.kv_cache.event_log import EventLog
from reprise_scheduler.kv_cache.eviction import EvictionPolicy, LeastRecentlyUsed
from reprise_scheduler.kv_cache.free_queue import FreeQueue
from reprise_scheduler.kv_cache.hash_index import HashIndex
from reprise_scheduler.kv_cache.observer import MAX_CLEARED, EntryObserver


class BlockPool:
    """Invariants (checked by `check_invariants`): the queue holds exactly the blocks with reference
    count 0; an index names exactly the blocks that have the entry; additional entries stand only
    beside an own one.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_groups: int = 1,
        events: EventLog,
        policy: EvictionPolicy | None = None,
        observers: Sequence[EntryObserver] = (),
    ) -> None:
        self.num_blocks = num_blocks
        self.indexes = tuple(HashIndex() for _ in range(num_groups))
        self.ref_counts = [0] * num_blocks
        self.num_taken = 0
        """Blocks handed out since the start: the clock by which the age of an eviction is told."""
        # An empty policy is false, so it is compared with None.
        order = LeastRecentlyUsed(num_blocks) if policy is None else policy
        self._queue = FreeQueue(num_blocks, order)
        self._events = events
        self._observers = tuple(observers)
        self._own: list[BlockHash | None] = [None] * num_blocks
        self._group_of = bytearray(num_blocks)
        # Only for own entries that cover less than their whole block: tokens covered from token 0 on.
        self._tail_tokens: dict[BlockId, int] = {}
        self._additional: dict[BlockId, set[BlockHash]] = {}

    @property
    def num_free(self) -> int:
        return len(self._queue)

    @property
    def usage(self) -> float:
        return 1 - len(self._queue) / (self.num_blocks - 1)

    # --- holding -------------------------------------------------------------------------------

    def take(self, num_blocks: int) -> list[BlockId]:
        """Hands out blocks from the front of the queue; their entries go. The caller checked the number."""
        fresh, victims = self._queue.take(num_blocks)
        self.num_taken += num_blocks
        ref_counts = self.ref_counts
        for block_id in fresh:
            ref_counts[block_id] = 1
        if victims:
            self._unhash_all(victims)
            for block_id in victims:
                ref_counts[block_id] = 1
            fresh += victims
        return fresh

    def _unhash_all(self, block_ids: Sequence[BlockId]) -> None:
        """`unhash` for each, at once where no block has more than its own entry and nobody watches."""
        own = self._own
        if self._observers or self._tail_tokens or self._additional or len(self.indexes) > 1:
            for block_id in block_ids:
                if own[block_id] is not None:
                    self.unhash(block_id)
            return
        entries = [(block_hash, b) for b in block_ids if (block_hash := own[b]) is not None]
        for block_id in block_ids:
            own[block_id] = None
        self.indexes[0].discard_all(entries)
        if self._events.enabled:
            for block_hash, _ in entries:
                self._events.removed(block_hash, GroupId(0))

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        """One holder more for each; the null block may be among them and is passed over."""
        ref_counts = self.ref_counts
        freed = [block_id for block_id in block_ids if not ref_counts[block_id] and block_id]
        if freed:
            self._queue.remove(freed)
        for block_id in block_ids:
            ref_counts[block_id] += 1
        ref_counts[NULL_BLOCK] = 0

    def give_back(self, block_ids: Sequence[BlockId]) -> None:
        """One holder less for each, in this order; null blocks are passed over.

        Of those that nobody holds now, the ones without an own entry are the next to be taken and
        the others the last.
        """
        ref_counts = self.ref_counts
        own = self._own
        unused = []
        reusable = []
        for block_id in block_ids:
            count = ref_counts[block_id] - 1
            ref_counts[block_id] = count
            if not count:
                if own[block_id] is None:
                    unused.append(block_id)
                else:
                    reusable.append(block_id)
        ref_counts[NULL_BLOCK] = 0
        if unused:
            self._queue.put_front(unused)
        if reusable:
            self._queue.put_back(reusable)

    def count_free(self, block_ids: Sequence[BlockId]) -> int:
        """How many of these are in the queue; a touch would take them out of it."""
        ref_counts = self.ref_counts
        return sum(1 for block_id in block_ids if not ref_counts[block_id] and block_id)

    # --- hash entries --------------------------------------------------------------------------

    def own_hash(self, block_id: BlockId) -> BlockHash | None:
        return self._own[block_id]

    def own_hashes(self) -> list[BlockHash | None]:
        """By block id."""
        return list(self._own)

    def holds(self, block_id: BlockId, group_id: GroupId, block_hash: BlockHash) -> bool:
        return self._own[block_id] == block_hash and self._group_of[block_id] == group_id

    def entries(self, block_id: BlockId) -> list[tuple[BlockHash, GroupId]]:
        """The own entry first, additional ones in byte order."""
        own = self._own[block_id]
        if own is None:
            return []
        group_id = GroupId(self._group_of[block_id])
        return [(own, group_id), *((h, group_id) for h in sorted(self._additional.get(block_id, ())))]

    def register_full(
        self, block_ids: Sequence[BlockId], block_hashes: Sequence[BlockHash], group_id: GroupId
    ) -> None:
        """Gives each of these held blocks, full now, its own entry; an entry of a shorter prefix goes."""
        own = self._own
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if own[block_id] is not None:
                self.unhash(block_id)
            own[block_id] = block_hash
        if len(self.indexes) > 1:
            for block_id in block_ids:
                self._group_of[block_id] = group_id
        self.indexes[group_id].add_all(block_hashes, block_ids)

    def register_tail(
        self, block_id: BlockId, block_hash: BlockHash, group_id: GroupId, num_tokens: int
    ) -> bool:
        """Enters the hash of a prompt's end inside the block, `num_tokens` being the prefix it covers.

        False, and nothing done, if the block has this entry already.
        """
        own = self._own[block_id]
        if own is not None and self._tail_tokens.get(block_id, num_tokens) < num_tokens:
            self.unhash(block_id)
            own = None
        if own is None:
            self._own[block_id] = block_hash
            self._group_of[block_id] = group_id
            self._tail_tokens[block_id] = num_tokens
        elif own == block_hash or block_hash in self._additional.get(block_id, ()):
            return False
        else:
            self._additional.setdefault(block_id, set()).add(block_hash)
        self.indexes[group_id].add(block_hash, block_id)
        return True

    def unhash(self, block_id: BlockId) -> None:
        """Removes the block's own entry, then the additional ones in byte order; one event each."""
        own = self._own[block_id]
        if own is None:
            return
        group_id = GroupId(self._group_of[block_id])
        self._own[block_id] = None
        self._remove_entry(own, block_id, group_id)
        if self._tail_tokens:
            self._tail_tokens.pop(block_id, None)
        if self._additional:
            for block_hash in sorted(self._additional.pop(block_id, ())):
                self._remove_entry(block_hash, block_id, group_id)

    def _remove_entry(self, block_hash: BlockHash, block_id: BlockId, group_id: GroupId) -> None:
        self.indexes[group_id].discard(block_hash, block_id)
        self._events.removed(block_hash, group_id)
        for observer in self._observers:
            observer.removed(block_id, block_hash, group_id)

    def reset(self) -> bool:
        """Drops every entry, if no block is held; free blocks keep their places in the queue."""
        if len(self._queue) != self.num_blocks - 1:
            return False
        for observer in self._observers:
            entries = ((h, GroupId(i)) for i, index in enumerate(self.indexes) for h in index.first)
            observer.clearing(list(islice(entries, MAX_CLEARED)))
        for index in self.indexes:
            index.clear()
        self._own = [None] * self.num_blocks
        self._tail_tokens.clear()
        self._additional.clear()
        self._events.cleared()
        return True

    # --- looking inside ------------------------------------------------------------------------

    def free_blocks(self) -> Iterator[BlockId]:
        """The next to be taken first."""
        return iter(self._queue)

    def check_invariants(self) -> None:
        """Cost grows with the pool; for tests."""
        queued = list(self._queue)
        unheld = {i for i in range(1, self.num_blocks) if not self.ref_counts[i]}
        assert len(queued) == len(set(queued)) == len(self._queue), "a block is queued twice"
        assert set(queued) == unheld, "the queue is not the set of blocks nobody holds"
        assert not self.ref_counts[NULL_BLOCK]
        assert self._own[NULL_BLOCK] is None, "the null block has an entry"
        assert min(self.ref_counts) >= 0
        self._check_entries()

    def _check_entries(self) -> None:
        indexed = {
            (block_id, block_hash, group_id)
            for group_id, index in enumerate(self.indexes)
            for block_hash in index.first
            for block_id in index.holders(block_hash)
        }
        held = {
            (BlockId(i), block_hash, int(group_id))
            for i in range(self.num_blocks)
            for block_hash, group_id in self.entries(BlockId(i))
        }
        assert indexed == held, "index and blocks disagree"
        assert all(self._own[block_id] is not None for block_id in self._additional)
        assert all(self._own[block_id] is not None for block_id in self._tail_tokens)
        assert all(twins for index in self.indexes for twins in index.twins.values())
        assert all(h in index.first for index in self.indexes for h in index.twins)
