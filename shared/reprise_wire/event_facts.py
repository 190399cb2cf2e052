"""Which blocks the publishers that are followed hold: an index of facts, fed by deliveries."""

from collections import Counter
from typing import NamedTuple

from reprise_core.block_record import BlockRecord
from reprise_core.kv_events import MEDIUM_DEVICE, ExternalHash
from reprise_wire.event_source_values import Delivery, DeliveryKind

FACTS_PER_EVENT = 256


class Owner(NamedTuple):
    """Ranks behind one endpoint are owners of their own: what one removes, the other still has."""

    source: str
    rank: int


class Fact(NamedTuple):
    block_hash: ExternalHash
    group: int
    medium: str


class EventFacts:
    """A block record per owner. At `limit_blocks` an owner's further blocks are not recorded, and its record
    says `overflowed`."""

    def __init__(self, *, limit_blocks: int = 4_000_000) -> None:
        self._limit_blocks = limit_blocks
        self._records: dict[Owner, BlockRecord] = {}

    def apply(self, delivery: Delivery) -> None:
        if delivery.kind is DeliveryKind.CLEARED:
            self.drop(delivery.source)
            return
        record = self.record(delivery.source, delivery.batch.data_parallel_rank or 0)
        for event in delivery.batch.events:
            record.apply(event)

    def drop(self, source: str) -> None:
        """Every rank of it."""
        self._records = {owner: held for owner, held in self._records.items() if owner.source != source}

    def record(self, source: str, rank: int = 0) -> BlockRecord:
        owner = Owner(source, rank)
        found = self._records.get(owner)
        if found is None:
            found = self._records[owner] = BlockRecord(limit_blocks=self._limit_blocks)
        return found

    def records(self, source: str) -> list[BlockRecord]:
        return [record for owner, record in self._records.items() if owner.source == source]

    def num_blocks(self, source: str) -> int:
        """A block counts once per owner, however many copies and media it has."""
        return sum(record.num_blocks for record in self.records(source))

    def holders(
        self, block_hash: ExternalHash, group: int | None = None, medium: str | None = None
    ) -> list[Owner]:
        return [owner for owner, held in self._records.items() if held.copies(block_hash, group, medium)]

    def copies(self, source: str, rank: int = 0) -> Counter[Fact]:
        """All facts of an owner with their numbers of copies; costs a walk through all of them."""
        counts: Counter[Fact] = Counter()
        for state in self.record(source, rank).freeze().stores(FACTS_PER_EVENT):
            event = state.event
            group, medium = event.group_idx or 0, event.medium or MEDIUM_DEVICE
            counts.update(Fact(block_hash, group, medium) for block_hash in event.block_hashes)
        return counts
