"""`reprise bench eviction`: how much of a recorded trace each eviction policy hits.

The requests of a Mooncake trace go one after another through the real cache manager: look up,
allocate, free. A token is hit or not whatever the machine, so these rows are the same everywhere.
"""

from collections.abc import Sequence
from pathlib import Path

from reprise_cli.bench.kv_cache import DEFAULT_MOONCAKE
from reprise_cli.bench.kv_cache_load import BLOCK_SIZE, BenchRequest, mooncake_requests, serve
from reprise_cli.bench.report import BenchRow
from reprise_core.errors import InvalidInput
from reprise_scheduler.kv_cache.config import GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager
from reprise_scheduler.kv_cache.policy_loading import load_policy

LRU = "reprise_scheduler.kv_cache.eviction:LeastRecentlyUsed"


def eviction(
    policies: Sequence[str] = (),
    *,
    num_blocks: int = 40_000,
    trace: Path = DEFAULT_MOONCAKE,
    count: int = 1000,
) -> list[BenchRow]:
    """One row per policy, named `module:Class`; the peer is least recently used.

    `num_blocks` of 16 tokens each, the first `count` requests of the trace.
    """
    if not trace.exists():
        raise InvalidInput("trace", f"there is no file {trace}")
    load = [*mooncake_requests(trace, count)]
    plain = hit_percent(load, LRU, num_blocks)
    rows = [BenchRow.higher_is_better("LeastRecentlyUsed", plain, "% of prompt tokens hit")]
    for name in policies:
        share = hit_percent(load, name, num_blocks)
        unit = "% of prompt tokens hit"
        rows.append(
            BenchRow.higher_is_better(name.partition(":")[2], share, unit, "LeastRecentlyUsed", plain)
        )
    return rows


def hit_percent(load: Sequence[BenchRequest], policy: str, num_blocks: int) -> float:
    """Hit tokens per hundred prompt tokens; a prompt that does not fit the pool counts as missed."""
    config = KVCacheConfig(num_blocks=num_blocks, groups=[GroupSpec(block_size=BLOCK_SIZE)])
    manager = KVCacheManager(config, eviction_policy=load_policy(policy, num_blocks))
    num_tokens = num_hit = 0
    for request in load:
        hit = manager.lookup(request)
        num_tokens += request.num_prompt_tokens
        if serve(manager, (request,)):
            num_hit += hit.num_tokens
    return 100.0 * num_hit / num_tokens
