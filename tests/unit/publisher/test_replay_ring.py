"""The ring: bounded by batches and bytes, found by sequence with gaps."""

import random

import pytest

from reprise_publisher.replay_ring import ReplayRing


@pytest.mark.parametrize("seed", range(20))
def test_it_holds_the_newest_within_both_limits(seed: int) -> None:
    rng = random.Random(seed)
    limit_batches, limit_bytes = rng.randint(0, 20), rng.randint(1, 2000)
    ring = ReplayRing(limit_batches=limit_batches, limit_bytes=limit_bytes)
    everything: list[tuple[int, int]] = []
    sequence = 0
    for _ in range(200):
        sequence += rng.choice((1, 1, 1, 5))
        size = rng.randint(0, 300)
        everything.append((sequence, size))
        ring.append(sequence, b"x" * size)
        kept = everything[len(everything) - len(ring) :]
        assert ring.num_bytes == sum(size for _, size in kept) <= limit_bytes
        assert len(ring) <= limit_batches
        one_more = everything[len(everything) - len(ring) - 1 :] if len(ring) < len(everything) else None
        if one_more is not None:
            assert len(one_more) > limit_batches or sum(size for _, size in one_more) > limit_bytes
        for wanted in (0, sequence, sequence + 1, rng.randint(0, sequence)):
            position = ring.position_of(wanted)
            found = ring.at(position)
            expected = next((number for number, _ in kept if number >= wanted), None)
            assert (found[1].sequence if found else None) == expected


def test_a_position_that_left_goes_on_with_the_oldest() -> None:
    ring = ReplayRing(limit_batches=2, limit_bytes=1000)
    ring.append(0, b"a")
    position = ring.position_of(0)
    for sequence in (1, 2, 3):
        ring.append(sequence, b"b")
    found = ring.at(position)
    assert found is not None
    assert (found[0], found[1].sequence) == (2, 2)


def test_heartbeats_in_a_row_take_one_place_and_keep_their_numbers() -> None:
    ring = ReplayRing(limit_batches=3, limit_bytes=1000)
    ring.append(0, b"first")
    for sequence in range(1, 10_001):
        ring.append(sequence, b"beat %d" % sequence, is_heartbeat=True)
    ring.append(10_001, b"second")
    assert len(ring) == 3
    assert ring.first_sequence == 0
    assert ring.num_bytes == len(b"first") + len(b"beat 10000") + len(b"second")
    found = ring.at(ring.position_of(5000))
    assert found is not None
    assert (found[1].sequence, found[1].end) == (1, 10_001)
    assert ring.after(9_998) == [(9_999, b"beat 10000"), (10_000, b"beat 10000"), (10_001, b"second")]
    assert ring.after(10_001) == []
    # A hole between two heartbeats keeps them apart.
    ring.append(10_002, b"beat", is_heartbeat=True)
    ring.append(10_005, b"beat", is_heartbeat=True)
    assert [number for number, _ in ring.after(10_001)] == [10_002, 10_005]
