"""What the caches of one source hold, told by its events."""

from array import array
from dataclasses import dataclass

from reprise_core.block_columns import (
    ABSENT,
    NO_BLOCK,
    NO_TOKENS,
    UNKNOWN_PARENT,
    BlockColumns,
    BlockShape,
    ExtraKeys,
    ValueTable,
)
from reprise_core.frozen_record import FrozenRecord, StateEvent
from reprise_core.kv_events import (
    MEDIUM_DEVICE,
    BlockRemoved,
    BlockStored,
    ExternalHash,
    KvEvent,
)

__all__ = ["BlockRecord", "Content", "FrozenRecord", "StateEvent"]

MEAN_TOKENS_LIMIT = 64
"""Larger blocks on the average use up the record's limit sooner."""
MAX_MEDIA = 16
MAX_GROUPS = 1024
"""More than there are in any cache: what comes after them is not recorded."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a block is, wherever its copies are."""

    parent: ExternalHash | None
    """None where the chain begins, and where `resolved` is False."""
    token_ids: tuple[int, ...]
    extra_keys: ExtraKeys | None
    lora_name: str | None
    lora_id: int | None
    block_size: int
    kind: str | None
    window: int | None
    resolved: bool
    """False for a block that came in an event with tokens of others too (a masked window group): which
    tokens are its own, and what comes before them, is not known."""


class BlockRecord:
    """Facts (hash, group, medium) with their number of copies, and the content of each (hash, group) for
    as long as any medium has a copy. No group is group 0, and no medium is the device.

    About 300 bytes a block of 16 tokens. At `limit_blocks` (parents that are only named count too)
    further blocks are not recorded: `overflowed` stays True until the source is cleared.

    Invariant: a block's parent has a place for as long as the block has one, so that a parent which
    is removed and stored again is found by all its children.
    """

    def __init__(self, *, limit_blocks: int) -> None:
        self._limit_blocks = limit_blocks
        self.num_unknown_removals = 0
        self.num_unknown_stores = 0
        """Blocks stored without tokens that nobody told the tokens of before."""
        self.num_not_recorded = 0
        self.overflowed = False
        self._clear()

    def _clear(self) -> None:
        self._columns = BlockColumns()
        self._shapes: ValueTable[BlockShape] = ValueTable()
        self._extra_keys: ValueTable[ExtraKeys] = ValueTable()
        self._index: dict[int, dict[ExternalHash, int]] = {}
        self._free: list[int] = []
        self._free_tokens: dict[int, list[int]] = {}
        self.num_blocks = 0
        self.num_copies = 0
        self._num_orphans = 0
        self._num_without_tokens = 0
        self.overflowed = False

    def apply(self, event: KvEvent) -> None:
        if type(event) is BlockStored:
            self._store(event)
        elif type(event) is BlockRemoved:
            self._remove(event)
        else:
            self._clear()

    @property
    def num_unresolved(self) -> int:
        return self._num_orphans + self._num_without_tokens

    def copies(self, block_hash: ExternalHash, group: int | None, medium: str | None) -> int:
        place = self._index.get(group or 0, {}).get(block_hash)
        column = self._columns.copies.get(medium or MEDIUM_DEVICE)
        return 0 if place is None or column is None else column[place]

    def blocks_in(self, medium: str) -> list[tuple[int, ExternalHash]]:
        """(group, hash) of each block that the medium has, in no particular order."""
        column = self._columns.copies.get(medium)
        if column is None:
            return []
        return [
            (group, block_hash)
            for group, index in self._index.items()
            for block_hash, place in index.items()
            if column[place]
        ]

    def content(self, block_hash: ExternalHash, group: int | None) -> Content | None:
        columns = self._columns
        place = self._index.get(group or 0, {}).get(block_hash)
        if place is None or columns.shape[place] == ABSENT:
            return None
        shape = self._shapes.values[columns.shape[place]]
        assert shape is not None
        start, parent = columns.token_start[place], columns.parent[place]
        known = start != NO_TOKENS
        return Content(
            parent=columns.hashes[parent] if parent >= 0 else None,
            token_ids=tuple(columns.tokens[start : start + shape.block_size]) if known else (),
            extra_keys=self._extra_keys.values[columns.extra_keys[place]],
            lora_name=shape.lora_name,
            lora_id=shape.lora_id,
            block_size=shape.block_size,
            kind=shape.kind,
            window=shape.window,
            resolved=known,
        )

    def freeze(self) -> FrozenRecord:
        return FrozenRecord(
            self._columns.copy(),
            self._shapes.values[:],
            self._extra_keys.values[:],
            num_blocks=self.num_blocks,
            num_copies=self.num_copies,
            num_unresolved=self.num_unresolved,
        )

    # -- stores -----------------------------------------------------------------------------------

    def _store(self, event: BlockStored) -> None:
        medium, group = event.medium or MEDIUM_DEVICE, event.group_idx or 0
        if (medium not in self._columns.copies and len(self._columns.copies) >= MAX_MEDIA) or (
            group not in self._index and len(self._index) >= MAX_GROUPS
        ):
            self._count_overflow(len(event.block_hashes))
            return
        copies = self._columns.copies_in(medium)
        index = self._index.setdefault(group, {})
        if event.token_ids:
            self._store_content(event, index, copies)
        else:
            self._store_known(event, index, copies)

    def _store_known(self, event: BlockStored, index: dict[ExternalHash, int], copies: "array[int]") -> None:
        shapes, is_report = self._columns.shape, event.report
        for block_hash in event.block_hashes:
            place = index.get(block_hash)
            if place is None or shapes[place] == ABSENT:
                self.num_unknown_stores += 1
            elif not (is_report and copies[place]):
                copies[place] += 1
                self.num_copies += 1

    def _store_content(
        self, event: BlockStored, index: dict[ExternalHash, int], copies: "array[int]"
    ) -> None:
        shapes, starts, is_report = self._columns.shape, self._columns.token_start, event.report
        fresh: _FreshBlocks | None = None
        parent_hash = event.parent_block_hash
        for i, block_hash in enumerate(event.block_hashes):
            place = index.get(block_hash)
            if place is None or shapes[place] == ABSENT or starts[place] == NO_TOKENS:
                # What only they need is made for them: twins and copies on other media are known.
                fresh = fresh or _FreshBlocks(event, self._shapes)
                place = self._fill(place, block_hash, fresh, i, parent_hash, index)
            if place is None:
                self._count_overflow(1)
            elif not (is_report and copies[place]):
                copies[place] += 1
                self.num_copies += 1
            parent_hash = block_hash
        if fresh is not None:
            self._shapes.release(fresh.shape)

    def _fill(
        self,
        place: int | None,
        block_hash: ExternalHash,
        fresh: "_FreshBlocks",
        i: int,
        parent_hash: ExternalHash | None,
        index: dict[ExternalHash, int],
    ) -> int | None:
        """The place of block i, with the content that it did not have, or without tokens. None at the
        limit, with everything as it was."""
        columns, tokens = self._columns, fresh.tokens_of(i)
        shapes = columns.shape
        if place is None:
            place = self._take_place(block_hash, index)
            if place is None:
                return None
        is_new = shapes[place] == ABSENT
        if tokens is None:
            if not is_new:
                return place
            self._num_without_tokens += 1
            columns.parent[place] = UNKNOWN_PARENT
        elif not self._continue_chain(place, tokens, parent_hash, index):
            self._settle(place, index)
            return None
        elif not is_new:
            self._num_without_tokens -= 1
        if is_new:
            self.num_blocks += 1
            self._num_orphans -= columns.num_children[place]
        else:
            self._shapes.release(shapes[place])
            self._extra_keys.release(columns.extra_keys[place])
        self._shapes.hold_again(fresh.shape)
        shapes[place] = fresh.shape
        columns.extra_keys[place] = self._extra_keys.hold(fresh.keys_of(i))
        return place

    def _continue_chain(
        self,
        place: int,
        tokens: "array[int]",
        parent_hash: ExternalHash | None,
        index: dict[ExternalHash, int],
    ) -> bool:
        """Gives a place its tokens and its parent. False at the limit, with nothing changed."""
        columns = self._columns
        parent = NO_BLOCK
        if parent_hash is not None:
            found = index.get(parent_hash)
            if found is None:
                found = self._take_place(parent_hash, index)
                if found is None:
                    return False
            parent = found
        start = self._put_tokens(tokens)
        if start is None:
            if parent != NO_BLOCK:
                self._settle(parent, index)
            return False
        columns.token_start[place] = start
        columns.parent[place] = parent
        if parent != NO_BLOCK:
            columns.num_children[parent] += 1
            columns.child[parent] = place
            self._num_orphans += columns.shape[parent] == ABSENT
        return True

    def _take_place(self, block_hash: ExternalHash, index: dict[ExternalHash, int]) -> int | None:
        if self._free:
            place = self._free.pop()
            self._columns.hashes[place] = block_hash
        elif len(self._columns) < self._limit_blocks:
            place = self._columns.append(block_hash)
        else:
            return None
        index[block_hash] = place
        return place

    def _put_tokens(self, tokens: "array[int]") -> int | None:
        """Where they begin; None at the limit."""
        num_tokens, arena = len(tokens), self._columns.tokens
        free = self._free_tokens.get(num_tokens)
        if free:
            start = free.pop()
            arena[start : start + num_tokens] = tokens
            return start
        start = len(arena)
        if start + num_tokens > self._limit_blocks * MEAN_TOKENS_LIMIT:
            return None
        arena.extend(tokens)
        return start

    def _count_overflow(self, num_blocks: int) -> None:
        self.num_not_recorded += num_blocks
        self.overflowed = True

    # -- removals ---------------------------------------------------------------------------------

    def _remove(self, event: BlockRemoved) -> None:
        column = self._columns.copies.get(event.medium or MEDIUM_DEVICE)
        index = self._index.get(event.group_idx or 0, {})
        columns = tuple(self._columns.copies.values())
        for block_hash in event.block_hashes:
            place = index.get(block_hash)
            if place is None or column is None or not column[place]:
                self.num_unknown_removals += 1
                continue
            column[place] -= 1
            self.num_copies -= 1
            for copies in columns:
                if copies[place]:
                    break
            else:
                self._drop_content(place, index)

    def _drop_content(self, place: int, index: dict[ExternalHash, int]) -> None:
        columns = self._columns
        shapes, num_children = columns.shape, columns.num_children
        shape = self._shapes.values[shapes[place]]
        assert shape is not None
        self.num_blocks -= 1
        self._num_orphans += num_children[place]
        start, parent = columns.token_start[place], columns.parent[place]
        if start == NO_TOKENS:
            self._num_without_tokens -= 1
        else:
            self._free_tokens.setdefault(shape.block_size, []).append(start)
        self._shapes.release(shapes[place])
        self._extra_keys.release(columns.extra_keys[place])
        shapes[place] = ABSENT
        columns.extra_keys[place] = 0
        columns.token_start[place] = NO_TOKENS
        columns.parent[place] = NO_BLOCK
        if parent >= 0:
            num_children[parent] -= 1
            if shapes[parent] == ABSENT:
                self._num_orphans -= 1
                self._settle(parent, index)
        self._settle(place, index)

    def _settle(self, place: int, index: dict[ExternalHash, int]) -> None:
        """Frees a place that has no block and that none names as its parent."""
        columns = self._columns
        if columns.num_children[place] or columns.shape[place] != ABSENT:
            return
        block_hash = columns.hashes[place]
        if block_hash is None:
            return
        del index[block_hash]
        columns.hashes[place] = None
        columns.child[place] = NO_BLOCK
        self._free.append(place)


class _FreshBlocks:
    """What the blocks of one stored event are filled with; its `shape` is held."""

    __slots__ = ("_keys", "_size", "_tokens", "shape")

    def __init__(self, event: BlockStored, shapes: ValueTable[BlockShape]) -> None:
        self.shape = shapes.hold(BlockShape.of(event))
        self._size = event.block_size
        self._tokens = _dense_tokens(event)
        keys = event.extra_keys
        self._keys = keys if keys is not None and len(keys) == len(event.block_hashes) else None

    def tokens_of(self, i: int) -> "array[int] | None":
        return None if self._tokens is None else self._tokens[i * self._size : (i + 1) * self._size]

    def keys_of(self, i: int) -> ExtraKeys | None:
        return None if self._keys is None else self._keys[i]


def _dense_tokens(event: BlockStored) -> "array[int] | None":
    """None when tokens and blocks do not match one to one, or are no token ids."""
    if event.block_size < 1 or len(event.token_ids) != len(event.block_hashes) * event.block_size:
        return None
    try:
        return array("I", event.token_ids)
    except OverflowError:
        return None
