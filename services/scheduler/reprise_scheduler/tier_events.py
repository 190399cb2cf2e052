"""KV events of the tiers below the device, made from what the store tells of them.

The store names blocks by hash alone; consumers want tokens, parent and extra keys with every store. So a
block is announced in a tier when this engine knows its content: because it computed or loaded it, whether
it still has it on the device or not. A block that is not known yet is announced when it becomes known.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from reprise_core.block_record import BlockRecord, Content
from reprise_core.hash_algorithms import external_hash
from reprise_core.ids import BlockHash
from reprise_core.kv_events import (
    MEDIUM_DEVICE,
    MEDIUM_EXTERNAL,
    MEDIUM_HOST,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExternalHash,
    KvEvent,
)
from reprise_wire.store_codec import StoreTier, TierChange

MEDIA = {
    StoreTier.HOST: MEDIUM_HOST,
    StoreTier.DISK: MEDIUM_STORAGE,
    StoreTier.EXTERNAL: MEDIUM_EXTERNAL,
}
BLOCKS_PER_EVENT = 256
MAX_KEPT = 131_072

_Key = tuple[int, ExternalHash]
"""Group and hash."""


@dataclass(slots=True)
class TierEventCounters:
    stored: int = 0
    """Blocks announced, per tier."""
    removed: int = 0
    unknown: int = 0
    """Blocks that a tier has and whose content was not known when it said so."""


class TierEvents:
    """`record` has every event that was sent, so it says what was announced; whoever owns it sends the
    events that come from here at once.

    Contents of blocks that left the device are kept for when they turn up in a tier, and blocks in tiers
    for when their content becomes known: the last `limit_kept` of each.
    """

    def __init__(
        self, record: BlockRecord, *, integer_hashes: bool = True, limit_kept: int = MAX_KEPT
    ) -> None:
        self.counters = TierEventCounters()
        self._record = record
        self._limit_kept = limit_kept
        self._external: Callable[[BlockHash], ExternalHash] = external_hash if integer_hashes else bytes
        self._kept: OrderedDict[_Key, Content] = OrderedDict()
        self._unknown: OrderedDict[_Key, set[str]] = OrderedDict()

    def before(self, events: Iterable[KvEvent]) -> Iterator[BlockStored] | None:
        """The engine's own events are about to be sent. Where they clear everything: what is to be told
        again after them, parents first, because a consumer then clears the tiers too. Each step of it
        costs about one event."""
        state = None
        for event in events:
            if type(event) is BlockRemoved:
                self._keep((event.group_idx or 0, name) for name in event.block_hashes)
            elif type(event) is AllBlocksCleared:
                self._keep(self._record.blocks_in(MEDIUM_DEVICE))
                state = self._announced()
        return state

    def after(self, events: Iterable[KvEvent]) -> list[KvEvent]:
        """They were sent. What they make known of the tiers."""
        run = _Run()
        if self._unknown:
            for event in events:
                if type(event) is BlockStored and event.medium == MEDIUM_DEVICE:
                    for name in event.block_hashes:
                        key = (event.group_idx or 0, name)
                        for medium in sorted(self._unknown.pop(key, ())):
                            self._come(key, medium, run)
        return run.events

    def change(self, changes: Sequence[TierChange]) -> list[KvEvent]:
        """What came into tiers and left them, each block of a tier at most once. Idempotent."""
        run = _Run()
        for change in changes:
            key, medium = (change.group_id, self._external(change.block_hash)), MEDIA[change.tier]
            if change.present:
                self._come(key, medium, run)
            elif self._record.copies(key[1], key[0], medium):
                self._go(key, medium, run)
            else:
                self._unknown.get(key, set()).discard(medium)
        return run.events

    def lose(self) -> Iterator[list[KvEvent]]:
        """Nothing is known of the tiers any more: takes everything back, a piece at a time."""
        self._unknown.clear()
        for medium in MEDIA.values():
            keys = self._record.blocks_in(medium)
            for start in range(0, len(keys), BLOCKS_PER_EVENT):
                run = _Run()
                for key in keys[start : start + BLOCKS_PER_EVENT]:
                    self._go(key, medium, run)
                yield run.events

    def _announced(self) -> Iterator[BlockStored]:
        frozen = self._record.freeze()
        media = tuple(MEDIA.values())
        return (state.event for state in frozen.stores(BLOCKS_PER_EVENT) if state.event.medium in media)

    def _come(self, key: _Key, medium: str, run: "_Run") -> None:
        group, name = key
        if self._record.copies(name, group, medium):
            return
        content = self._record.content(name, group)
        if content is None and not self._record.overflowed:
            # What the record has no room for could never be taken back.
            content = self._kept.pop(key, None)
        if content is None or not content.resolved:
            self.counters.unknown += 1
            self._unknown.setdefault(key, set()).add(medium)
            if len(self._unknown) > self._limit_kept:
                self._unknown.popitem(last=False)
            return
        run.store(key, medium, content)
        self.counters.stored += 1

    def _go(self, key: _Key, medium: str, run: "_Run") -> None:
        self._keep((key,))
        run.remove(key, medium)
        self.counters.removed += 1

    def _keep(self, keys: Iterable[_Key]) -> None:
        """The contents of blocks that lose a copy, which may be the last."""
        for key in keys:
            content = self._record.content(key[1], key[0])
            if content is not None and content.resolved:
                self._kept[key] = content
                self._kept.move_to_end(key)
                if len(self._kept) > self._limit_kept:
                    self._kept.popitem(last=False)


class _Run:
    """Events in the making: neighbours of one chain, and removals from one medium, share an event."""

    def __init__(self) -> None:
        self._done: list[KvEvent] = []
        self._medium = ""
        self._group = 0
        self._names: list[ExternalHash] = []
        self._contents: list[Content] = []
        """Of stored blocks; empty in a run of removals."""

    @property
    def events(self) -> list[KvEvent]:
        self._end()
        return self._done

    def store(self, key: _Key, medium: str, content: Content) -> None:
        if not self._goes_on(key[0], medium, content):
            self._end()
        self._medium, self._group = medium, key[0]
        self._names.append(key[1])
        self._contents.append(content)

    def remove(self, key: _Key, medium: str) -> None:
        if self._contents or (key[0], medium) != (self._group, self._medium):
            self._end()
        self._medium, self._group = medium, key[0]
        self._names.append(key[1])

    def _goes_on(self, group: int, medium: str, content: Content) -> bool:
        if not self._contents or len(self._names) >= BLOCKS_PER_EVENT:
            return False
        last = self._contents[-1]
        same_place = (group, medium, content.parent) == (self._group, self._medium, self._names[-1])
        return same_place and (content.block_size, content.lora_name) == (last.block_size, last.lora_name)

    def _end(self) -> None:
        if self._contents:
            self._done.append(self._stored())
        elif self._names:
            removed = BlockRemoved(
                block_hashes=tuple(self._names), medium=self._medium, group_idx=self._group
            )
            self._done.append(removed)
        self._names, self._contents = [], []

    def _stored(self) -> BlockStored:
        first = self._contents[0]
        return BlockStored(
            block_hashes=tuple(self._names),
            parent_block_hash=first.parent,
            token_ids=tuple(chain.from_iterable(content.token_ids for content in self._contents)),
            block_size=first.block_size,
            lora_id=first.lora_id,
            lora_name=first.lora_name,
            medium=self._medium,
            extra_keys=tuple(content.extra_keys for content in self._contents),
            group_idx=self._group,
            kv_cache_spec_kind=first.kind,
            kv_cache_spec_sliding_window=first.window,
        )
