"""The index of facts over several owners."""

from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, KvEvent, KvEventBatch
from reprise_wire.event_facts import EventFacts, Fact, Owner
from reprise_wire.event_source_values import Delivery, DeliveryKind
from support.event_world import stored


def apply(facts: EventFacts, *events: KvEvent, source: str = "a", rank: int = 0) -> None:
    batch = KvEventBatch(1.0, events, rank)
    facts.apply(Delivery(source, DeliveryKind.LIVE, 1, "t", batch, 10))


def test_a_removal_by_one_rank_leaves_the_others_copy() -> None:
    facts = EventFacts()
    apply(facts, stored(1, None), rank=0)
    apply(facts, stored(1, None), rank=1)
    apply(facts, BlockRemoved(block_hashes=(1,), medium="GPU"), rank=1)
    assert facts.holders(1) == [Owner("a", 0)]


def test_copies_and_media_are_counted_one_by_one() -> None:
    facts = EventFacts()
    apply(facts, stored(1, None), stored(1, None), stored(1, None, "CPU"))
    assert facts.copies("a") == {Fact(1, 0, "GPU"): 2, Fact(1, 0, "CPU"): 1}
    apply(facts, BlockRemoved(block_hashes=(1,), medium="GPU"))
    assert facts.holders(1) == [Owner("a", 0)]
    apply(facts, BlockRemoved(block_hashes=(1,), medium="GPU"))
    assert facts.holders(1) == []
    assert facts.holders(1, medium="CPU") == [Owner("a", 0)]
    assert facts.num_blocks("a") == 1


def test_cleared_is_for_a_rank_and_void_for_the_whole_source() -> None:
    facts = EventFacts()
    for rank in (0, 1):
        apply(facts, stored(1, None), rank=rank)
    apply(facts, stored(1, None), source="b")
    apply(facts, AllBlocksCleared(), rank=0)
    assert facts.holders(1) == [Owner("a", 1), Owner("b", 0)]
    cleared = KvEventBatch(0.0, (AllBlocksCleared(),))
    facts.apply(Delivery("a", DeliveryKind.CLEARED, 1, "", cleared, 0))
    assert facts.holders(1) == [Owner("b", 0)]
