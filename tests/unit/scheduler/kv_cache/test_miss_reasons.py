"""Why a hit ended: told for the first block that missed."""

import pytest

from reprise_core.ids import BlockId
from reprise_scheduler.kv_cache import miss_reasons
from reprise_scheduler.kv_cache.config import GroupKind, GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager
from reprise_scheduler.kv_cache.miss_reasons import MissKind, MissReason
from unit.scheduler.kv_cache.simple_request import SimpleRequest


def make(num_blocks: int = 11, **settings: object) -> KVCacheManager:
    settings = {"groups": [GroupSpec(block_size=4)], "track_misses": True, **settings}
    return KVCacheManager(KVCacheConfig(num_blocks=num_blocks, **settings))  # type: ignore[arg-type]


def run(manager: KVCacheManager, request: SimpleRequest) -> None:
    hit = manager.lookup(request)
    num_new = len(request.token_ids) - hit.num_tokens
    assert manager.allocate(request, num_new, num_computed_tokens=0, hit=hit) is not None
    manager.free(request)


def explain(manager: KVCacheManager, request: SimpleRequest) -> MissReason:
    return manager.explain_miss(request, manager.lookup(request))


def test_never_seen() -> None:
    manager = make()
    run(manager, SimpleRequest("a", [*range(9)]))
    reason = explain(manager, SimpleRequest("b", [0, 1, 2, 3, 70, 71, 72, 73, 74]))
    assert reason == MissReason(MissKind.NEVER_SEEN, token_index=4, group_id=0)  # type: ignore[arg-type]


def test_evicted_says_how_long_ago() -> None:
    manager = make(num_blocks=6)
    run(manager, SimpleRequest("a", [*range(9)]))
    run(manager, SimpleRequest("b", [*range(50, 70)]))
    reason = explain(manager, SimpleRequest("c", [*range(9)]))
    assert (reason.kind, reason.token_index) == (MissKind.EVICTED, 0)
    # Block 1 went with the last of five blocks that were taken in one call.
    assert reason.evicted_ago == 0
    run(manager, SimpleRequest("d", [*range(80, 92)]))
    assert explain(manager, SimpleRequest("e", [*range(9)])).evicted_ago == 3


def test_a_reset_evicts_too() -> None:
    manager = make()
    run(manager, SimpleRequest("a", [*range(9)]))
    assert manager.reset()
    assert explain(manager, SimpleRequest("b", [*range(9)])).kind is MissKind.EVICTED


def test_other_namespace() -> None:
    manager = make()
    run(manager, SimpleRequest("a", [*range(9)], cache_salt="one"))
    assert (
        explain(manager, SimpleRequest("b", [*range(9)], cache_salt="two")).kind is MissKind.OTHER_NAMESPACE
    )
    assert explain(manager, SimpleRequest("c", [*range(9)])).kind is MissKind.OTHER_NAMESPACE
    assert explain(manager, SimpleRequest("d", [*range(1, 10)])).kind is MissKind.NEVER_SEEN


@pytest.mark.parametrize(
    ("num_tokens", "kind"),
    [(8, MissKind.HIT_CAP), (9, MissKind.BELOW_ONE_BLOCK), (3, MissKind.BELOW_ONE_BLOCK)],
)
def test_what_could_not_be_hit(num_tokens: int, kind: MissKind) -> None:
    manager = make()
    run(manager, SimpleRequest("a", [*range(9)]))
    assert explain(manager, SimpleRequest("b", [*range(num_tokens)])).kind is kind


def test_skipped_look_up_names_the_rule() -> None:
    request = SimpleRequest("a", [*range(9)], skip_lookup=True)
    manager = make()
    reason = manager.explain_miss(request, manager.lookup(request), skip_rule="prompt logprobs")
    assert (reason.kind, reason.rule) == (MissKind.LOOKUP_SKIPPED, "prompt logprobs")
    manager = make(enable_caching=False)
    assert explain(manager, SimpleRequest("b", [*range(9)])).rule == "prefix caching is off"


def test_the_group_that_missed() -> None:
    sliding = GroupSpec(kind=GroupKind.SLIDING, block_size=4, window=5)
    manager = make(num_blocks=20, groups=[GroupSpec(block_size=4), sliding])
    run(manager, SimpleRequest("a", [*range(9)]))
    request = SimpleRequest("b", [*range(9)])
    hit = manager.lookup(request)
    assert hit.num_tokens == 8
    manager.evict([hit.blocks[1][-1]])
    reason = explain(manager, request)
    assert (reason.kind, reason.group_id, reason.token_index) == (MissKind.EVICTED, 1, 4)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_reasons, "MAX_EVICTED", 2)
    manager = make()
    run(manager, SimpleRequest("a", [*range(17)]))
    manager.evict([BlockId(4), BlockId(3), BlockId(2), BlockId(1)])
    assert explain(manager, SimpleRequest("b", [*range(5)])).kind is MissKind.EVICTED
    manager.evict([BlockId(i) for i in range(1, 11)])
    run(manager, SimpleRequest("c", [*range(30, 42)]))
    manager.evict([BlockId(i) for i in range(1, 11)])
    assert explain(manager, SimpleRequest("d", [*range(5)])).kind is MissKind.NEVER_SEEN
