"""What the caches of one source hold, told by its events."""

from array import array
from collections.abc import Iterator
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
            places = self._places_with_content(event, index)
        else:
            places = self._known_places(event, index)
        for place in places:
            if not (event.report and copies[place]):
                copies[place] += 1
                self.num_copies += 1

    def _known_places(self, event: BlockStored, index: dict[ExternalHash, int]) -> Iterator[int]:
        shape = self._columns.shape
        for block_hash in event.block_hashes:
            place = index.get(block_hash)
            if place is None or shape[place] == ABSENT:
                self.num_unknown_stores += 1
            else:
                yield place

    def _places_with_content(self, event: BlockStored, index: dict[ExternalHash, int]) -> Iterator[int]:
        """The place of each block, with its content in it."""
        columns, size, hashes = self._columns, event.block_size, event.block_hashes
        tokens = _dense_tokens(event)
        parent_hash = event.parent_block_hash
        keys = event.extra_keys
        if keys is not None and len(keys) != len(hashes):
            keys = None
        shape = self._shapes.hold(BlockShape.of(event))
        for i, block_hash in enumerate(hashes):
            place = index.get(block_hash)
            if place is None:
                place = self._take_place(block_hash, index)
            if place is not None and (
                columns.shape[place] == ABSENT or columns.token_start[place] == NO_TOKENS
            ):
                own = None if tokens is None else tokens[i * size : (i + 1) * size]
                if not self._fill(place, shape, own, parent_hash, keys[i] if keys else None, index):
                    place = None
            if place is None:
                self._count_overflow(1)
            else:
                yield place
            parent_hash = block_hash
        self._shapes.release(shape)

    def _fill(
        self,
        place: int,
        shape: int,
        tokens: "array[int] | None",
        parent_hash: ExternalHash | None,
        extra_keys: ExtraKeys | None,
        index: dict[ExternalHash, int],
    ) -> bool:
        """The content of a block that has none, or no tokens. False, and the place as it was or free,
        at the limit."""
        columns = self._columns
        parent = UNKNOWN_PARENT
        if tokens is not None:
            found = self._parent_place(parent_hash, index) if self._has_room_for(len(tokens)) else None
            if found is None:
                self._settle(place, index)
                return False
            parent = found
        if columns.shape[place] == ABSENT:
            self.num_blocks += 1
            self._num_orphans -= columns.num_children[place]
            self._num_without_tokens += tokens is None
        elif tokens is not None:
            self._num_without_tokens -= 1
        else:
            return True
        self._set_kind(place, shape, extra_keys)
        columns.parent[place] = parent
        if tokens is not None:
            columns.token_start[place] = self._put_tokens(tokens)
        if parent >= 0:
            columns.num_children[parent] += 1
            columns.child[parent] = place
            self._num_orphans += columns.shape[parent] == ABSENT
        return True

    def _set_kind(self, place: int, shape: int, extra_keys: ExtraKeys | None) -> None:
        columns = self._columns
        old_shape, old_keys = columns.shape[place], columns.extra_keys[place]
        self._shapes.hold_again(shape)
        columns.shape[place] = shape
        columns.extra_keys[place] = self._extra_keys.hold(extra_keys)
        self._shapes.release(old_shape)
        self._extra_keys.release(old_keys)

    def _parent_place(self, parent_hash: ExternalHash | None, index: dict[ExternalHash, int]) -> int | None:
        """None when there is no room for a parent that was not known."""
        if parent_hash is None:
            return NO_BLOCK
        place = index.get(parent_hash)
        return self._take_place(parent_hash, index) if place is None else place

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

    def _has_room_for(self, num_tokens: int) -> bool:
        if self._free_tokens.get(num_tokens):
            return True
        return len(self._columns.tokens) + num_tokens <= self._limit_blocks * MEAN_TOKENS_LIMIT

    def _put_tokens(self, tokens: "array[int]") -> int:
        arena, free = self._columns.tokens, self._free_tokens.get(len(tokens))
        if free:
            start = free.pop()
            arena[start : start + len(tokens)] = tokens
            return start
        start = len(arena)
        arena.extend(tokens)
        return start

    def _count_overflow(self, num_blocks: int) -> None:
        self.num_not_recorded += num_blocks
        self.overflowed = True

    # -- removals ---------------------------------------------------------------------------------

    def _remove(self, event: BlockRemoved) -> None:
        column = self._columns.copies.get(event.medium or MEDIUM_DEVICE)
        index = self._index.get(event.group_idx or 0, {})
        others = tuple(self._columns.copies.values())
        for block_hash in event.block_hashes:
            place = index.get(block_hash)
            if place is None or column is None or not column[place]:
                self.num_unknown_removals += 1
                continue
            column[place] -= 1
            self.num_copies -= 1
            if not any(copies[place] for copies in others):
                self._drop_content(place, index)

    def _drop_content(self, place: int, index: dict[ExternalHash, int]) -> None:
        columns = self._columns
        shape = self._shapes.values[columns.shape[place]]
        assert shape is not None
        self.num_blocks -= 1
        self._num_orphans += columns.num_children[place]
        start, parent = columns.token_start[place], columns.parent[place]
        if start == NO_TOKENS:
            self._num_without_tokens -= 1
        else:
            self._free_tokens.setdefault(shape.block_size, []).append(start)
        self._shapes.release(columns.shape[place])
        self._extra_keys.release(columns.extra_keys[place])
        columns.shape[place] = ABSENT
        columns.extra_keys[place] = 0
        columns.token_start[place] = NO_TOKENS
        columns.parent[place] = NO_BLOCK
        if parent >= 0:
            columns.num_children[parent] -= 1
            self._num_orphans -= columns.shape[parent] == ABSENT
            self._settle(parent, index)
        self._settle(place, index)

    def _settle(self, place: int, index: dict[ExternalHash, int]) -> None:
        """Frees a place that has no block and that none names as its parent."""
        columns = self._columns
        block_hash = columns.hashes[place]
        if block_hash is None or columns.shape[place] != ABSENT or columns.num_children[place]:
            return
        del index[block_hash]
        columns.hashes[place] = None
        columns.child[place] = NO_BLOCK
        self._free.append(place)


def _dense_tokens(event: BlockStored) -> "array[int] | None":
    """None when tokens and blocks do not match one to one, or are no token ids."""
    if event.block_size < 1 or len(event.token_ids) != len(event.block_hashes) * event.block_size:
        return None
    try:
        return array("I", event.token_ids)
    except OverflowError:
        return None
