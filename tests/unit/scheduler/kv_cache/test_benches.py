"""The benchmarks of the cache manager run and say what they claim to say."""

from pathlib import Path

import pytest

from reprise_cli.bench import kv_cache as bench
from reprise_cli.bench.eviction import eviction
from reprise_cli.bench.kv_cache import DEFAULT_MOONCAKE
from reprise_cli.bench.kv_cache_load import mooncake_requests, serve, serve_plain, unlike_prompts, whole_load
from reprise_cli.bench.multi_turn import make_multi_turn
from reprise_cli.bench.plain_kv_cache import PlainKVCache
from reprise_core.errors import InvalidInput
from reprise_scheduler.kv_cache.config import GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager

SEGMENTED = "unit.scheduler.kv_cache.segmented:Segmented"
TENANT_SHARES = "reprise_scheduler.kv_cache.tenant_shares:TenantShares"


def test_a_policy_is_compared_with_least_recently_used_on_a_recorded_trace() -> None:
    rows = {row.case: row for row in eviction([SEGMENTED], num_blocks=40_000, count=600)}
    assert rows["Segmented"].value > rows["LeastRecentlyUsed"].value > 0


def test_tenants_without_shares_hit_as_least_recently_used_does() -> None:
    lru, shares = eviction([TENANT_SHARES], num_blocks=20_000, count=150)
    assert (shares.value, shares.ratio) == (lru.value, 1.0)


def test_a_missing_trace_is_named() -> None:
    with pytest.raises(InvalidInput, match="nowhere"):
        eviction(trace=Path("nowhere.jsonl"))


def test_pool_size_rows() -> None:
    rows = {row.case: row for row in bench._pool_size_rows(1_000, 1)}
    assert rows["1,000 blocks: look up"].unit == "ns/block"
    memory = rows["1,000 blocks: memory, hashes not counted"]
    assert memory.ratio is not None
    assert memory.ratio > 1.0


def test_both_caches_do_the_same_work() -> None:
    load = [*mooncake_requests(DEFAULT_MOONCAKE, 60), *unlike_prompts("x", 3)]
    config = KVCacheConfig(num_blocks=5_000, groups=[GroupSpec(block_size=16)])
    assert serve(KVCacheManager(config), load) == serve_plain(PlainKVCache(config), load) > 5_000


def test_the_workload_is_the_one_that_was_measured() -> None:
    load = make_multi_turn()
    lengths = sorted(len(prompt) for prompt, _ in load)
    assert (len(load), sum(lengths)) == (625, 4_571_353)
    assert (lengths[0], lengths[len(lengths) // 2], lengths[-1]) == (1_736, 6_337, 16_333)
    assert {len(answer) for _, answer in load} == {64}


def test_the_whole_load_ends_with_every_block_free() -> None:
    manager = KVCacheManager(KVCacheConfig(num_blocks=5_000, groups=[GroupSpec(block_size=16)]))
    load = [request for _, request in zip(range(12), bench.multi_turn_requests(), strict=False)]
    whole_load(manager, load)
    assert manager.num_free_blocks == 4_999
    assert manager.take_stats().requests == 12
    manager.check_invariants()
