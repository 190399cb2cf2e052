"""Events of the tiers: each has its content, and a consumer that replays them is right about every tier."""

import random
from collections.abc import Iterable

import pytest

from reprise_core.block_record import BlockRecord
from reprise_core.hash_algorithms import external_hash
from reprise_core.ids import BlockHash
from reprise_core.kv_events import (
    MEDIUM_DEVICE,
    MEDIUM_EXTERNAL,
    MEDIUM_HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
)
from reprise_scheduler.tier_events import BLOCKS_PER_EVENT, TierEvents
from reprise_wire.store_codec import StoreTier, TierChange

SIZE = 2


def digest(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def name(number: int) -> int:
    return external_hash(digest(number))


def stored(*numbers: int, parent: int | None = None, salt: str | None = None) -> BlockStored:
    """Blocks of one chain on the device; block n has the tokens (n, n)."""
    return BlockStored(
        block_hashes=tuple(name(number) for number in numbers),
        parent_block_hash=None if parent is None else name(parent),
        token_ids=tuple(number for number in numbers for _ in range(SIZE)),
        block_size=SIZE,
        lora_id=None,
        medium=MEDIUM_DEVICE,
        lora_name=None,
        extra_keys=tuple((salt,) if salt else None for _ in numbers),
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def removed(*numbers: int) -> BlockRemoved:
    names = tuple(name(number) for number in numbers)
    return BlockRemoved(block_hashes=names, medium=MEDIUM_DEVICE, group_idx=0)


def came(*numbers: int, tier: StoreTier = StoreTier.HOST) -> list[TierChange]:
    return [TierChange(tier, 0, digest(number), True) for number in numbers]


def went(*numbers: int, tier: StoreTier = StoreTier.HOST) -> list[TierChange]:
    return [TierChange(tier, 0, digest(number), False) for number in numbers]


class Engine:
    """An engine whose events a consumer replays by itself: sets of hashes by medium."""

    def __init__(self, **limits: int) -> None:
        self.record = BlockRecord(limit_blocks=100_000)
        self.tiers = TierEvents(self.record, **limits)
        self.sent: list[KvEvent] = []
        self.held: dict[str, dict[int, int]] = {}
        self.contents: dict[int, tuple[int, ...]] = {}

    def device(self, *events: KvEvent) -> list[KvEvent]:
        again = self.tiers.before(events)
        self.send(events)
        return [*self.send(self.tiers.after(events)), *self.send(again or ())]

    def store_says(self, changes: list[TierChange]) -> list[KvEvent]:
        return self.send(self.tiers.change(changes))

    def lose(self) -> list[KvEvent]:
        return [event for events in self.tiers.lose() for event in self.send(events)]

    def send(self, events: Iterable[KvEvent]) -> list[KvEvent]:
        events = list(events)
        for event in events:
            self.record.apply(event)
            self.consume(event)
        self.sent += events
        return events

    def consume(self, event: KvEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.held.clear()
        elif isinstance(event, BlockRemoved):
            counts = self.held[event.medium or ""]
            for block in event.block_hashes:
                counts[block] -= 1
                assert counts[block] >= 0, "removed what was not stored"
        else:
            # As consumers want it: dense, with the right tokens, and a parent that chains.
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            counts = self.held.setdefault(event.medium or "", {})
            for index, block in enumerate(event.block_hashes):
                tokens = event.token_ids[index * SIZE : (index + 1) * SIZE]
                assert self.contents.setdefault(block, tokens) == tokens
                counts[block] = counts.get(block, 0) + 1

    def has(self, medium: str) -> set[int]:
        """Numbers of the blocks."""
        return {block for block, count in self.held.get(medium, {}).items() if count}


def test_a_chain_in_a_tier_is_one_event_with_everything_in_it() -> None:
    engine = Engine()
    engine.device(stored(1, 2, 3, salt="s"))
    (event,) = engine.store_says(came(1, 2, 3))
    assert event == BlockStored(
        block_hashes=(1, 2, 3),
        parent_block_hash=None,
        token_ids=(1, 1, 2, 2, 3, 3),
        block_size=SIZE,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        extra_keys=(("s",), ("s",), ("s",)),
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def test_blocks_that_do_not_follow_each_other_have_events_of_their_own() -> None:
    engine = Engine()
    engine.device(stored(1, 2), stored(5, parent=1))
    events = engine.store_says(came(2, 5, 1))
    assert [event.block_hashes for event in events] == [(2,), (5,), (1,)]
    assert [event.parent_block_hash for event in events] == [1, 1, None]


def test_every_tier_has_a_medium_of_its_own_and_a_removal_is_of_one() -> None:
    """The kind of fault E3 and E5 name: a removal on one tier takes nothing from another."""
    engine = Engine()
    engine.device(stored(1, 2))
    engine.store_says(came(1, 2))
    engine.store_says([*came(1, tier=StoreTier.DISK), *came(1, 2, tier=StoreTier.EXTERNAL)])
    engine.device(removed(2, 1))
    assert engine.has(MEDIUM_DEVICE) == set()
    assert engine.has(MEDIUM_HOST) == engine.has(MEDIUM_EXTERNAL) == {1, 2}
    assert engine.has("STORAGE") == {1}
    engine.store_says(went(1, 2))
    assert engine.has(MEDIUM_HOST) == set()
    assert engine.has(MEDIUM_EXTERNAL) == {1, 2}
    engine.device(stored(1))
    assert engine.has(MEDIUM_EXTERNAL) == {1, 2}
    assert engine.has(MEDIUM_DEVICE) == {1}


def test_e5_a_block_that_left_the_device_before_its_tier_told_of_it_still_has_its_tokens() -> None:
    engine = Engine()
    engine.device(stored(1, 2))
    engine.device(removed(2), removed(1))
    (event,) = engine.store_says(came(1, 2))
    assert event.token_ids == (1, 1, 2, 2)
    assert engine.tiers.counters.unknown == 0


def test_e3_what_is_told_twice_is_announced_once_and_gone_with_one_removal() -> None:
    engine = Engine()
    engine.device(stored(1, 2, 3))
    engine.store_says(came(1, 2))
    assert [event.block_hashes for event in engine.store_says(came(2, 3))] == [(3,)]
    engine.store_says(went(1, 2))
    assert engine.has(MEDIUM_HOST) == {3}
    assert engine.store_says(went(2)) == []


def test_blocks_of_unknown_content_are_counted_and_announced_when_they_become_known() -> None:
    engine = Engine()
    assert engine.store_says(came(1, 2) + came(1, tier=StoreTier.EXTERNAL)) == []
    assert engine.tiers.counters.unknown == 3
    assert engine.store_says(went(2)) == []
    engine.device(stored(1, 2))  # loaded, or computed here too
    assert engine.has(MEDIUM_HOST) == engine.has(MEDIUM_EXTERNAL) == {1}


def test_after_everything_was_cleared_the_tiers_are_told_again_parents_first() -> None:
    engine = Engine()
    engine.device(stored(1, 2, 3), stored(7, parent=2))
    engine.store_says(came(7, 3, 2))
    engine.store_says(came(1, 2, 3, tier=StoreTier.EXTERNAL))
    again = engine.device(AllBlocksCleared())
    assert engine.has(MEDIUM_DEVICE) == set()
    assert engine.has(MEDIUM_HOST) == {2, 3, 7}
    assert engine.has(MEDIUM_EXTERNAL) == {1, 2, 3}
    order = [block for event in again for block in event.block_hashes if event.medium == MEDIUM_HOST]
    assert order.index(2) < order.index(3)
    assert order.index(2) < order.index(7)


def test_a_reset_before_the_tier_told_does_not_lose_the_content() -> None:
    engine = Engine()
    engine.device(stored(1, 2))
    engine.device(AllBlocksCleared())
    engine.store_says(came(1, 2))
    assert engine.has(MEDIUM_HOST) == {1, 2}


def test_a_broken_watch_takes_everything_back_and_a_new_one_tells_it_again() -> None:
    engine = Engine()
    engine.device(stored(*range(1, 600)))
    engine.device(removed(*range(1, 600)))
    engine.store_says(came(*range(1, 600)))
    engine.store_says(came(5, tier=StoreTier.EXTERNAL))
    events = engine.lose()
    assert engine.has(MEDIUM_HOST) == engine.has(MEDIUM_EXTERNAL) == set()
    assert max(len(event.block_hashes) for event in events) <= BLOCKS_PER_EVENT
    engine.store_says(came(*range(1, 600)))
    assert engine.has(MEDIUM_HOST) == set(range(1, 600))


def test_what_is_kept_and_what_is_unknown_is_limited() -> None:
    engine = Engine(limit_kept=3)
    engine.device(stored(1, 2, 3, 4, 5))
    engine.device(removed(5, 4, 3, 2, 1))
    engine.store_says(came(1, 2, 3, 4, 5))
    assert engine.has(MEDIUM_HOST) == {1, 2, 3}
    assert engine.tiers.counters.unknown == 2
    engine.store_says(came(6, 7, 8))
    engine.device(stored(4, 5, 6, 7, 8))
    assert engine.has(MEDIUM_HOST) == {1, 2, 3, 6, 7, 8}


@pytest.mark.parametrize("round_", range(20))
def test_any_order_of_events_leaves_consumers_right(round_: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    engine = Engine()
    parents = {number: rng.randrange(number) or None for number in range(1, 40)}
    device: set[int] = set()
    told: dict[StoreTier, set[int]] = {StoreTier.HOST: set(), StoreTier.EXTERNAL: set()}
    ever: set[int] = set()
    for _ in range(400):
        number, tier = rng.randrange(1, 40), rng.choice(list(told))
        action = rng.random()
        if action < 0.3 and number not in device:
            engine.device(stored(number, parent=parents[number]))
            device.add(number)
            ever.add(number)
        elif action < 0.5 and number in device:
            engine.device(removed(number))
            device.remove(number)
        elif action < 0.75:
            engine.store_says(came(number, tier=tier))
            told[tier].add(number)
        elif action < 0.97:
            engine.store_says(went(number, tier=tier))
            told[tier].discard(number)
        elif action < 0.985:
            engine.device(AllBlocksCleared())
            device.clear()
        else:
            engine.lose()
            told = {tier: set() for tier in told}
        assert engine.has(MEDIUM_DEVICE) == device
        assert engine.has(MEDIUM_HOST) == told[StoreTier.HOST] & ever
        assert engine.has(MEDIUM_EXTERNAL) == told[StoreTier.EXTERNAL] & ever
