"""The events of a step, in the order in which they happened."""

from collections.abc import Callable, Sequence

from reprise_core.extra_keys import EventExtraKeys, HashInputs, event_extra_keys
from reprise_core.hash_algorithms import external_hash
from reprise_core.ids import BlockHash, GroupId
from reprise_core.kv_events import (
    MEDIUM_DEVICE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExternalHash,
    KvEvent,
)
from reprise_scheduler.kv_cache.config import GroupKind
from reprise_scheduler.kv_cache.group import Group
from reprise_scheduler.kv_cache.request import CachedRequest

SPEC_KINDS = {
    GroupKind.FULL: "full_attention",
    GroupKind.SLIDING: "sliding_window",
    GroupKind.CHUNKED: "chunked_local_attention",
}


class EventLog:
    """Collects events until they are taken; the scheduler takes them after every step.

    One step's events are bounded by what the step does: a stored event per group and scheduled
    request, and a removed one per entry of a block taken.
    """

    __slots__ = ("_events", "_external", "_report_mark", "enabled")

    def __init__(self, *, enabled: bool, integer_hashes: bool = True, mark_reports: bool = False) -> None:
        self.enabled = enabled
        self._report_mark = True if mark_reports else None
        self._external: Callable[[BlockHash], ExternalHash] = external_hash if integer_hashes else bytes
        self._events: list[KvEvent] = []

    def take(self) -> list[KvEvent]:
        events, self._events = self._events, []
        return events

    def removed(self, block_hash: BlockHash, group_id: GroupId) -> None:
        if self.enabled:
            self._events.append(
                BlockRemoved(
                    block_hashes=(self._external(block_hash),), medium=MEDIUM_DEVICE, group_idx=group_id
                )
            )

    def cleared(self) -> None:
        if self.enabled:
            self._events.append(AllBlocksCleared())

    def reported(self, request: CachedRequest, group: Group, end_block: int) -> None:
        """The request's first blocks, which are there already and are named again."""
        self.stored(request, group, 0, end_block, block_size=group.block_size, report=self._report_mark)

    def stored(
        self,
        request: CachedRequest,
        group: Group,
        first_block: int,
        end_block: int,
        *,
        block_size: int,
        kept: Sequence[int] | None = None,
        report: bool | None = None,
    ) -> None:
        """Blocks [first_block, end_block) of `block_size` tokens each, counted from token 0.

        `kept` are the places in that range whose blocks have the entry; None = all. The tokens are
        those of the whole range all the same.
        """
        if not self.enabled:
            return
        ratio = block_size // group.hash_block_size
        hashes = request.block_hashes[(first_block + 1) * ratio - 1 : end_block * ratio : ratio]
        extra_keys = _extra_keys(request, block_size, first_block, len(hashes))
        if kept is not None:
            hashes = [hashes[i] for i in kept]
            extra_keys = tuple(extra_keys[i] for i in kept)
        lora = request.lora
        self._events.append(
            BlockStored(
                block_hashes=tuple(map(self._external, hashes)),
                parent_block_hash=self._external(request.block_hashes[first_block * ratio - 1])
                if first_block
                else None,
                token_ids=tuple(request.token_ids[first_block * block_size : end_block * block_size]),
                block_size=block_size,
                lora_id=lora.int_id if lora else None,
                lora_name=lora.name if lora else None,
                medium=MEDIUM_DEVICE,
                extra_keys=extra_keys or None,
                group_idx=group.id,
                kv_cache_spec_kind=SPEC_KINDS[group.kind],
                kv_cache_spec_sliding_window=group.window,
                report=report,
            )
        )


def _extra_keys(
    request: CachedRequest, block_size: int, first_block: int, num_blocks: int
) -> tuple[EventExtraKeys | None, ...]:
    if request.lora is None and not request.cache_salt:
        return (None,) * num_blocks
    inputs = HashInputs(lora=request.lora, cache_salt=request.cache_salt)
    keys = event_extra_keys(inputs, block_size=block_size, first_block=first_block, num_blocks=num_blocks)
    return keys or (None,) * num_blocks
