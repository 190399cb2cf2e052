"""The block record: what it holds after any events, and what it tells of that."""

import random
from collections import Counter

import pytest

from reprise_core.block_record import BlockRecord, FrozenRecord, StateEvent
from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

SIZE = 4


def tokens_of(block_hash: int, size: int = SIZE) -> tuple[int, ...]:
    return tuple(block_hash * 100 + i for i in range(size))


def stored(
    *hashes: int, parent: int | None = None, medium: str | None = "GPU", **fields: object
) -> BlockStored:
    values: dict[str, object] = {
        "token_ids": tuple(t for h in hashes for t in tokens_of(h)),
        "block_size": SIZE,
        "lora_id": None,
        "lora_name": None,
        "group_idx": 0,
        **fields,
    }
    return BlockStored(block_hashes=hashes, parent_block_hash=parent, medium=medium, **values)  # type: ignore[arg-type]


def removed(*hashes: int, medium: str | None = "GPU", group: int = 0) -> BlockRemoved:
    return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group)


def record_of(*events: KvEvent, limit: int = 1000) -> BlockRecord:
    record = BlockRecord(limit_blocks=limit)
    for event in events:
        record.apply(event)
    return record


def told(frozen: FrozenRecord, blocks_per_event: int = 100) -> list[StateEvent]:
    return list(frozen.stores(blocks_per_event))


def test_a_chain_is_one_dense_event() -> None:
    record = record_of(stored(1, 2), stored(3, parent=2))
    (state,) = told(record.freeze())
    assert state.resolved
    assert state.event.block_hashes == (1, 2, 3)
    assert state.event.parent_block_hash is None
    assert state.event.token_ids == tokens_of(1) + tokens_of(2) + tokens_of(3)
    assert state.event.extra_keys == (None, None, None)
    assert [len(s.event.block_hashes) for s in told(record.freeze(), 2)] == [2, 1]


def test_a_report_is_no_copy_and_a_repeated_store_is() -> None:
    report = stored(1, 2, 3, report=True)
    record = record_of(*[report] * 5)
    assert record.num_blocks == 3
    assert [record.copies(h, 0, "GPU") for h in (1, 2, 3)] == [1, 1, 1]
    record.apply(removed(1))
    assert record.copies(1, 0, "GPU") == 0
    record = record_of(stored(1), stored(1), removed(1))
    assert record.copies(1, 0, "GPU") == 1


def test_overlapping_chunks_of_a_tier_hold_a_block_twice() -> None:
    record = record_of(stored(1, 2, medium="CPU"), stored(2, 3, parent=1, medium="CPU"))
    record.apply(removed(1, 2, medium="CPU"))
    assert record.content(2, 0) is not None
    record.apply(removed(2, 3, medium="CPU"))
    assert record.content(2, 0) is None
    assert record.num_blocks == 0


def test_a_tier_store_without_tokens_takes_them_from_the_device() -> None:
    bare = stored(1, 2, medium="CPU", token_ids=(), block_size=0)
    record = record_of(bare)
    assert (record.num_unknown_stores, record.num_blocks) == (2, 0)
    record = record_of(stored(1, 2), bare, removed(1, 2))
    assert record.num_unknown_stores == 0
    (state,) = told(record.freeze())
    assert (state.event.medium, state.event.token_ids) == ("CPU", tokens_of(1) + tokens_of(2))
    content = record.content(2, 0)
    assert content is not None
    assert (content.parent, content.token_ids) == (1, tokens_of(2))


def test_no_medium_is_the_device_and_no_group_the_first() -> None:
    record = record_of(stored(1, medium=None, group_idx=None), stored(1, medium="CPU"))
    record.apply(removed(1))
    assert (record.copies(1, None, None), record.copies(1, None, "CPU")) == (0, 1)


def test_removing_what_is_not_there_is_counted() -> None:
    record = record_of(stored(1), removed(1, medium="CPU"), removed(2), removed(1, group=1))
    assert record.num_unknown_removals == 3
    assert record.num_blocks == 1


def test_a_missing_parent_makes_unresolved_until_it_is_back() -> None:
    record = record_of(stored(1, 2), removed(1))
    assert record.num_unresolved == 1
    (state,) = told(record.freeze())
    assert (state.resolved, state.event.parent_block_hash, state.event.block_hashes) == (False, 1, (2,))
    record.apply(stored(1))
    assert record.num_unresolved == 0
    (state,) = told(record.freeze())
    assert (state.resolved, state.event.block_hashes) == (True, (1, 2))


def test_a_masked_window_group_is_partly_known_and_filled_later() -> None:
    masked = stored(2, 4, group_idx=1, token_ids=tuple(range(4 * SIZE)))
    record = record_of(masked)
    assert (record.num_blocks, record.num_unresolved) == (2, 2)
    assert [(s.resolved, s.event.token_ids, s.event.block_hashes) for s in told(record.freeze())] == [
        (False, (), (2,)),
        (False, (), (4,)),
    ]
    record.apply(stored(2, group_idx=1, extra_keys=(("salt",),)))
    assert record.num_unresolved == 1
    assert record.copies(2, 1, "GPU") == 2
    # What it says of the block is what counts, whatever the first event said.
    record.apply(stored(4, group_idx=1, block_size=2, token_ids=(8, 9)))
    contents = [record.content(h, 1) for h in (2, 4)]
    assert [(c.token_ids, c.block_size, c.extra_keys, c.resolved) for c in contents if c] == [
        (tokens_of(2), SIZE, ("salt",), True),
        ((8, 9), 2, None, True),
    ]


def test_what_differs_is_told_apart() -> None:
    record = record_of(
        stored(1, extra_keys=(("salt",),)),
        stored(2, parent=1, extra_keys=(None,)),
        stored(3, parent=2, lora_id=7, lora_name="sql", extra_keys=(("sql",),)),
        stored(3, parent=2, lora_id=7, lora_name="sql"),
    )
    events = [s.event for s in told(record.freeze())]
    assert [(e.block_hashes, e.lora_name, e.extra_keys) for e in events] == [
        ((1, 2), None, (("salt",), None)),
        ((3,), "sql", (("sql",),)),
        ((3,), "sql", (("sql",),)),
    ]


def test_cleared_forgets_everything() -> None:
    record = record_of(stored(1, 2), AllBlocksCleared())
    assert (record.num_blocks, told(record.freeze())) == (0, [])
    assert record.content(1, 0) is None


def test_the_limit_keeps_what_was_first_and_says_so() -> None:
    record = record_of(stored(1, 2, 3), stored(4, parent=9), limit=3)
    assert (record.num_blocks, record.overflowed, record.num_not_recorded) == (3, True, 1)
    record.apply(removed(3))
    record.apply(stored(4, parent=2))
    assert record.copies(4, 0, "GPU") == 1
    # A parent that is not known needs room as well.
    record.apply(removed(4))
    record.apply(stored(5, parent=77))
    assert (record.copies(5, 0, "GPU"), record.num_not_recorded) == (0, 2)
    record.apply(AllBlocksCleared())
    assert not record.overflowed


def test_blocks_larger_than_the_mean_use_up_the_limit() -> None:
    record = record_of(limit=2)
    record.apply(stored(1, block_size=120, token_ids=tuple(range(120))))
    record.apply(stored(2, block_size=120, token_ids=tuple(range(120))))
    assert (record.num_blocks, record.overflowed) == (1, True)


def test_nonsense_of_a_foreign_engine_is_survived() -> None:
    record = record_of(
        stored(1, parent=1),
        stored(2, parent=3),
        stored(3, parent=2),
        stored(5, token_ids=(2**40,) * SIZE),
        stored(6, block_size=-1),
        stored(block_size=0),
        *[stored(1, medium=f"M{i}") for i in range(40)],
        *[stored(group_idx=i, token_ids=()) for i in range(5000)],
    )
    assert record.overflowed
    frozen = record.freeze()
    assert {h for s in told(frozen) for h in s.event.block_hashes} == {1, 2, 3, 5, 6}
    assert sum(len(s.event.block_hashes) for s in told(frozen) if s.event.medium == "GPU") == 5
    for block_hash in (1, 2, 3, 5, 6):
        record.apply(removed(block_hash))
    assert record.num_unresolved == 0


def test_bytes_are_hashes_too() -> None:
    first, second = b"a" * 32, b"b" * 32
    record = record_of(stored(1), AllBlocksCleared())
    record.apply(
        BlockStored(
            block_hashes=(first, second),
            parent_block_hash=None,
            token_ids=tuple(range(8)),
            block_size=4,
            lora_id=None,
            lora_name=None,
            medium="GPU",
        )
    )
    (state,) = told(record.freeze())
    assert state.event.block_hashes == (first, second)
    assert state.event.group_idx is None


class Model:
    """The same, plainly: every fact and every content in a dictionary."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[int, int, str]] = Counter()
        self.content: dict[tuple[int, int], tuple[int | None, tuple[int, ...]]] = {}
        self.num_unknown_removals = 0

    def apply(self, event: KvEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.copies.clear()
            self.content.clear()
            return
        group, medium = event.group_idx or 0, event.medium or "GPU"
        if isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                if not self.copies[block_hash, group, medium]:
                    self.num_unknown_removals += 1
                    continue
                self.copies[block_hash, group, medium] -= 1
                if not any(n for (h, g, _), n in self.copies.items() if (h, g) == (block_hash, group)):
                    del self.content[block_hash, group]
            return
        parent = event.parent_block_hash
        for i, block_hash in enumerate(event.block_hashes):
            if event.token_ids:
                own = event.token_ids[i * SIZE : (i + 1) * SIZE]
                self.content.setdefault((block_hash, group), (parent, own))  # type: ignore[arg-type]
            elif (block_hash, group) not in self.content:
                continue
            if not (event.report and self.copies[block_hash, group, medium]):
                self.copies[block_hash, group, medium] += 1  # type: ignore[index]
            parent = block_hash

    @property
    def facts(self) -> dict[tuple[int, int, str], int]:
        return {fact: count for fact, count in self.copies.items() if count}


def random_event(rng: random.Random) -> KvEvent:
    """Hash h of a tree: its parent is h // 2."""
    if rng.random() < 0.005:
        return AllBlocksCleared()
    group, medium = rng.choice((0, 0, 0, 1)), rng.choice(("GPU", "GPU", "CPU", None))
    first = rng.randrange(1, 40)
    if rng.random() < 0.5:
        return removed(
            *{rng.randrange(1, 80) for _ in range(rng.randrange(1, 4))}, medium=medium, group=group
        )
    chain = [first]
    while rng.random() < 0.6 and len(chain) < 5:
        chain.append(chain[-1] * 2 + rng.randrange(2))
    bare = medium == "CPU" and rng.random() < 0.5
    return stored(
        *chain,
        parent=first // 2 or None,
        medium=medium,
        group_idx=group,
        report=rng.random() < 0.2 or None,
        **({"token_ids": ()} if bare else {}),
    )


@pytest.mark.parametrize("seed", [random.randrange(2**32) for _ in range(5)])
def test_any_events_leave_what_a_plain_model_has(seed: int) -> None:
    rng = random.Random(seed)
    record, model = record_of(limit=10_000), Model()
    for step in range(1500):
        event = random_event(rng)
        record.apply(event)
        model.apply(event)
        if step % 50:
            continue
        facts = model.facts
        frozen = record.freeze()
        again, plain_again = BlockRecord(limit_blocks=10_000), Model()
        seen: set[tuple[object, int]] = set()
        num_unresolved = 0
        for state in told(frozen, rng.randrange(1, 8)):
            event = state.event
            group = event.group_idx or 0
            parent = event.parent_block_hash
            assert state.resolved == (parent is None or (parent, group) in seen)
            seen.update((block_hash, group) for block_hash in event.block_hashes)
            again.apply(event)
            plain_again.apply(event)
        for (_, group), (parent, _) in model.content.items():
            num_unresolved += parent is not None and (parent, group) not in model.content
        assert plain_again.facts == facts, f"seed {seed}"
        assert plain_again.content == model.content
        for medium in ("GPU", "CPU"):
            there = {
                (group, name) for (name, group, where), count in facts.items() if count and where == medium
            }
            assert set(record.blocks_in(medium)) == there
            assert len(record.blocks_in(medium)) == len(there)
        assert frozen.num_copies == sum(facts.values())
        assert (frozen.num_blocks, frozen.num_unresolved) == (len(model.content), num_unresolved)
        assert record.num_unknown_removals == model.num_unknown_removals
        assert again.num_blocks == record.num_blocks
    # Nothing is left behind: every place is free again when every block is gone.
    for (block_hash, group, medium), count in model.facts.items():
        for _ in range(count):
            record.apply(removed(block_hash, medium=medium, group=group))
    assert record.num_blocks == 0
    assert len(record._free) == len(record._columns)
    assert not any(record._index.values())
