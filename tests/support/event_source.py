"""A source of events without sockets: what it holds, and the messages that say so."""

import random

from reprise_core.block_record import BlockRecord
from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from reprise_wire.event_codec import encode_batch
from reprise_wire.event_intake import StateChunk, batch_frames, hello_frames, state_frames

BLOCK_SIZE = 4


def stored(*hashes: int, parent: int | None = None, medium: str = "GPU") -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tuple(h * 10 + i for h in hashes for i in range(BLOCK_SIZE)),
        block_size=BLOCK_SIZE,
        lora_id=None,
        lora_name=None,
        medium=medium,
        group_idx=0,
    )


def removed(*hashes: int, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=0)


def facts_of(record: BlockRecord) -> dict[tuple[int | bytes, str | None], tuple[object, ...]]:
    """Copies, parent and tokens of every block on every medium, by its record."""
    facts: dict[tuple[int | bytes, str | None], tuple[object, ...]] = {}
    for state in record.freeze().stores(1):
        event = state.event
        (block_hash,) = event.block_hashes
        num_copies, *_ = facts.get((block_hash, event.medium), (0,))
        assert isinstance(num_copies, int)
        facts[block_hash, event.medium] = (num_copies + 1, event.parent_block_hash, event.token_ids)
    return facts


class EventSource:
    """One epoch. Blocks form a tree: the parent of h is h // 2."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.epoch = rng.randbytes(16)
        self.sequence = 0
        self.record = BlockRecord(limit_blocks=10_000)

    def batch(self, *events: KvEvent) -> list[bytes]:
        for event in events:
            self.record.apply(event)
        sequence, self.sequence = self.sequence, self.sequence + 1
        content = encode_batch(KvEventBatch(float(sequence), events, 0))
        return batch_frames(self.epoch, sequence, content)

    def random_batch(self) -> list[bytes]:
        return self.batch(*(self.random_event() for _ in range(self._rng.randrange(1, 4))))

    def random_event(self) -> KvEvent:
        if self._rng.random() < 0.002:
            return AllBlocksCleared()
        block_hash, medium = self._rng.randrange(1, 60), self._rng.choice(("GPU", "GPU", "CPU"))
        held = self.record.copies(block_hash, 0, medium)
        if held and self._rng.random() < 0.7:
            return removed(block_hash, medium=medium)
        return stored(block_hash, parent=block_hash // 2 or None, medium=medium)

    def hello(self) -> list[bytes]:
        return hello_frames(self.epoch, self.sequence)

    def state(self, state_id: int, *, events_per_chunk: int = 7, complete: bool = True) -> list[list[bytes]]:
        """Messages with all that is held now."""
        frozen = self.record.freeze()
        events = [state.event for state in frozen.stores(2)]
        parts = [events[i : i + events_per_chunk] for i in range(0, len(events), events_per_chunk)] or [[]]
        return [
            state_frames(
                self.epoch,
                self.sequence,
                StateChunk(
                    state_id, i, i == len(parts) - 1, frozen.num_blocks, frozen.num_unresolved, complete
                ),
                encode_batch(KvEventBatch(0.0, tuple(part), 0)),
            )
            for i, part in enumerate(parts)
        ]
