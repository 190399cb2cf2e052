"""From a block hash to the blocks that hold it, in one group."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from reprise_core.ids import BlockHash, BlockId


class HashIndex:
    """Several blocks may hold one hash; the one that has held it longest is found.

    Invariants: `first` has every hash that any block holds; `twins` has the other holders, the
    longest first, and no empty mappings.
    """

    __slots__ = ("first", "twins")

    def __init__(self) -> None:
        # Plain numbers as values keep a walk over a prompt inside C code.
        self.first: dict[BlockHash, BlockId] = {}
        self.twins: dict[BlockHash, OrderedDict[BlockId, None]] = {}

    def add(self, block_hash: BlockHash, block_id: BlockId) -> None:
        if self.first.setdefault(block_hash, block_id) != block_id:
            self.twins.setdefault(block_hash, OrderedDict())[block_id] = None

    def add_all(self, block_hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]) -> None:
        """The same for hashes and blocks in step."""
        first = self.first
        if first.keys().isdisjoint(block_hashes):
            length = len(first) + len(block_hashes)
            first.update(zip(block_hashes, block_ids, strict=True))
            if len(first) == length:
                return
            for block_hash in block_hashes:  # One hash twice in the list: only a collision does that.
                first.pop(block_hash, None)
        for block_hash, block_id in zip(block_hashes, block_ids, strict=True):
            self.add(block_hash, block_id)

    def discard(self, block_hash: BlockHash, block_id: BlockId) -> None:
        """The block holds the hash no more; the next longest holder is found from now on."""
        others = self.twins.get(block_hash) if self.twins else None
        if others is None:
            del self.first[block_hash]
            return
        if self.first[block_hash] == block_id:
            self.first[block_hash] = others.popitem(last=False)[0]
        else:
            del others[block_id]
        if not others:
            del self.twins[block_hash]

    def discard_all(self, entries: Iterable[tuple[BlockHash, BlockId]]) -> None:
        if self.twins:
            for block_hash, block_id in entries:
                self.discard(block_hash, block_id)
            return
        first = self.first
        for block_hash, _ in entries:
            del first[block_hash]

    def clear(self) -> None:
        self.first.clear()
        self.twins.clear()

    def holders(self, block_hash: BlockHash) -> Iterator[BlockId]:
        """The longest first."""
        if block_hash in self.first:
            yield self.first[block_hash]
            yield from self.twins.get(block_hash, ())
