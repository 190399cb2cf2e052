"""Pinned prefixes outlive eviction, within a limit."""

import pytest

from reprise_core.errors import FailedPrecondition
from reprise_scheduler.kv_cache import pins
from reprise_scheduler.kv_cache.config import GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager
from unit.scheduler.kv_cache.simple_request import SimpleRequest


def make(max_pinned_blocks: int = 4) -> KVCacheManager:
    groups = [GroupSpec(block_size=4)]
    return KVCacheManager(KVCacheConfig(num_blocks=9, groups=groups, max_pinned_blocks=max_pinned_blocks))


def start(manager: KVCacheManager, request: SimpleRequest) -> None:
    hit = manager.lookup(request)
    num_new = len(request.token_ids) - hit.num_tokens
    assert manager.allocate(request, num_new, num_computed_tokens=0, hit=hit) is not None


def flood(manager: KVCacheManager, num_blocks: int) -> bool:
    request = SimpleRequest("flood", [*range(1000, 1000 + 4 * num_blocks)])
    if manager.allocate(request, 4 * num_blocks, num_computed_tokens=0) is None:
        return False
    manager.free(request)
    return True


def test_a_pinned_prefix_survives_a_flood_until_it_is_unpinned() -> None:
    manager = make()
    request = SimpleRequest("a", [*range(10)])
    start(manager, request)
    pin = manager.pin_prefix(request)
    assert pin is not None
    assert (pin.block_ids, pin.num_tokens, manager.pins()) == ((1, 2), 10, [pin])
    manager.free(request)
    manager.check_invariants()
    assert not flood(manager, 8)
    assert flood(manager, 6)
    assert manager.lookup(SimpleRequest("b", [*range(10)])).num_tokens == 8
    assert manager.unpin(pin.pin_id)
    assert not manager.unpin(pin.pin_id)
    assert flood(manager, 8)
    assert manager.lookup(SimpleRequest("b", [*range(10)])).num_tokens == 0
    manager.check_invariants()


def test_the_limit_refuses_and_counts() -> None:
    manager = make(max_pinned_blocks=3)
    first, second = SimpleRequest("a", [*range(8)]), SimpleRequest("b", [*range(4), 50, 51, 52, 53, 54])
    start(manager, first)
    start(manager, second)
    assert manager.pin_prefix(first) is not None
    # One block is pinned already, so the second prefix needs only one more.
    assert manager.pin_prefix(second) is not None
    assert manager.num_pinned_blocks == 3
    third = SimpleRequest("c", [*range(60, 64)])
    start(manager, third)
    assert manager.pin_prefix(third) is None
    assert manager.num_pins_refused == 1
    manager.check_invariants()


def test_no_pins_unless_allowed() -> None:
    manager = make(max_pinned_blocks=0)
    request = SimpleRequest("a", [*range(8)])
    start(manager, request)
    assert manager.pin_prefix(request) is None


def test_pins_expire_on_the_callers_clock() -> None:
    manager = make()
    request = SimpleRequest("a", [*range(8)])
    start(manager, request)
    short = manager.pin_prefix(request, num_tokens=4, expires_at=10)
    long = manager.pin_prefix(request, expires_at=20.5)
    forever = manager.pin_prefix(request)
    manager.free(request)
    assert manager.expire_pins(9.9) == []
    assert manager.expire_pins(10) == [short]
    assert manager.expire_pins(100) == [long]
    assert manager.pins() == [forever]
    manager.check_invariants()


def test_only_a_request_with_blocks_can_pin() -> None:
    manager = make()
    with pytest.raises(FailedPrecondition, match="holds no blocks"):
        manager.pin_prefix(SimpleRequest("a", [*range(8)]))
    short = SimpleRequest("b", [1, 2])
    start(manager, short)
    assert manager.pin_prefix(short) is None


def test_a_reset_drops_pins_but_not_while_a_request_runs() -> None:
    manager = make()
    request = SimpleRequest("a", [*range(8)])
    start(manager, request)
    assert manager.pin_prefix(request) is not None
    assert not manager.reset()
    assert len(manager.pins()) == 1
    manager.free(request)
    assert manager.reset()
    assert manager.pins() == []
    manager.check_invariants()


def test_the_number_of_pins_is_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "MAX_PINS", 2)
    manager = make()
    request = SimpleRequest("a", [*range(8)])
    start(manager, request)
    made = [manager.pin_prefix(request) for _ in range(3)]
    assert [pin is not None for pin in made] == [True, True, False]
    assert manager.num_pins_refused == 1


def test_pinning_again_and_again_leaves_nothing_behind() -> None:
    manager = make()
    request = SimpleRequest("a", [*range(8)])
    start(manager, request)
    for _ in range(500):
        pin = manager.pin_prefix(request, expires_at=1e9)
        assert pin is not None
        assert manager.unpin(pin.pin_id)
    assert len(manager._pins._deadlines) <= 65
    assert manager.ref_counts()[1:3] == (1, 1)
