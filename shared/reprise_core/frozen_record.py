"""A block record at one moment, told as events."""

from collections.abc import Iterator
from dataclasses import dataclass

from reprise_core.block_columns import (
    ABSENT,
    NO_BLOCK,
    NO_TOKENS,
    BlockColumns,
    BlockShape,
    ExtraKeys,
)
from reprise_core.kv_events import BlockStored

_PENDING, _TOLD = 1, 2


@dataclass(frozen=True, slots=True)
class StateEvent:
    event: BlockStored
    resolved: bool
    """The parent of the first block is none or was told before, and the tokens are there."""


class FrozenRecord:
    """Belongs to whoever has it; the record it was taken from goes on.

    Invariants: `num_blocks` blocks have a copy somewhere, `num_copies` in all; `num_unresolved` of them
    have a parent that nobody holds, or tokens and parent that no event told.
    """

    def __init__(
        self,
        columns: BlockColumns,
        shapes: list[BlockShape | None],
        extra_keys: list[ExtraKeys | None],
        *,
        num_blocks: int,
        num_copies: int,
        num_unresolved: int,
    ) -> None:
        self._columns = columns
        self._shapes = shapes
        self._extra_keys = extra_keys
        self.num_blocks = num_blocks
        self.num_copies = num_copies
        self.num_unresolved = num_unresolved

    def stores(self, blocks_per_event: int) -> Iterator[StateEvent]:
        """Parents before children, blocks of one chain in one event as far as they are alike, and an
        event for each copy on each medium.

        Blocks in a circle (which no hash gives, but a foreign engine could say) come once each, one
        of them unresolved. Told in pieces: each step of the iterator costs about one event.
        """
        told = bytearray(len(self._columns))
        for place in range(len(told)):
            if told[place] or self._columns.shape[place] == ABSENT:
                continue
            path = self._path_through(place, told)
            begin = 0
            while begin < len(path):
                end = self._end_of_run(path, begin, begin + blocks_per_event)
                yield from self._events_of(path[begin:end], told)
                begin = end

    def _path_through(self, place: int, told: bytearray) -> list[int]:
        """From the nearest told or missing ancestor down through `place`, as long as there is a child."""
        columns = self._columns
        parents, shapes = columns.parent, columns.shape
        path = []
        up = place
        while up >= 0 and not told[up] and shapes[up] != ABSENT:
            told[up] = _PENDING
            path.append(up)
            up = parents[up]
        path.reverse()
        last = place
        while (down := columns.child[last]) != NO_BLOCK:
            if parents[down] != last or told[down] or shapes[down] == ABSENT:
                break
            told[down] = _PENDING
            path.append(down)
            last = down
        return path

    def _end_of_run(self, path: list[int], begin: int, limit: int) -> int:
        """Up to where the blocks have the same shape, as many copies, and tokens."""
        columns = self._columns
        shapes, copies = columns.shape, tuple(columns.copies.values())
        first = path[begin]
        if columns.token_start[first] == NO_TOKENS:
            return begin + 1
        shape, wanted = shapes[first], [column[first] for column in copies]
        end = begin + 1
        while end < len(path) and end < limit:
            place = path[end]
            if shapes[place] != shape or columns.token_start[place] == NO_TOKENS:
                break
            if any(column[place] != count for column, count in zip(copies, wanted, strict=True)):
                break
            end += 1
        return end

    def _events_of(self, run: list[int], told: bytearray) -> Iterator[StateEvent]:
        columns = self._columns
        parent = columns.parent[run[0]]
        resolved = (parent == NO_BLOCK or (parent >= 0 and told[parent] == _TOLD)) and (
            columns.token_start[run[0]] != NO_TOKENS
        )
        for place in run:
            told[place] = _TOLD
        for medium, column in columns.copies.items():
            if column[run[0]]:
                stored = StateEvent(self._stored(run, medium), resolved)
                for _ in range(column[run[0]]):
                    yield stored

    def _stored(self, run: list[int], medium: str) -> BlockStored:
        columns = self._columns
        shape = self._shapes[columns.shape[run[0]]]
        assert shape is not None
        hashes, starts, tokens = columns.hashes, columns.token_start, columns.tokens
        token_ids: list[int] = []
        if starts[run[0]] != NO_TOKENS:
            for place in run:
                token_ids += tokens[starts[place] : starts[place] + shape.block_size]
        keys = tuple(self._extra_keys[columns.extra_keys[place]] for place in run)
        parent = columns.parent[run[0]]
        return BlockStored(
            block_hashes=tuple(hashes[place] for place in run),  # type: ignore[misc]
            parent_block_hash=hashes[parent] if parent >= 0 else None,
            token_ids=tuple(token_ids),
            block_size=shape.block_size,
            lora_id=shape.lora_id,
            medium=medium,
            lora_name=shape.lora_name,
            extra_keys=keys,
            group_idx=shape.group_idx,
            kv_cache_spec_kind=shape.kind,
            kv_cache_spec_sliding_window=shape.window,
            locality=shape.locality,
            ownership=shape.ownership,
        )
