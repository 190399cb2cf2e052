"""`reprise bench kv-cache`: the cache manager's cost per block, and that it does not grow with the pool.

Three kinds of rows. The multi-turn rows have two or three peers each: the figures that were recorded
from the reference on the same workload (another run, so for orientation), the plain cache in this run,
and the reference in this run where `make peers` has installed it.
The Mooncake rows replay a recorded conversation trace. The `N blocks` rows do the same small piece of
work on full pools of 1k, 100k and 1M blocks.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from reprise_cli.bench.kv_cache_load import (
    BLOCK_SIZE,
    PROMPT_BLOCKS,
    BenchRequest,
    make_hasher,
    mooncake_requests,
    multi_turn_requests,
    serve,
    serve_plain,
    unlike_prompts,
    whole_load,
)
from reprise_cli.bench.plain_kv_cache import PlainKVCache
from reprise_cli.bench.reference import Reference, find_reference
from reprise_cli.bench.report import BenchRow
from reprise_core.ids import BlockId
from reprise_scheduler.kv_cache.config import GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager

POOL_SIZES = (1_000, 100_000, 1_000_000)
LARGE_POOL, SMALL_POOL = 100_000, 20_000
REPEATS = 3

# Medians of two recorded runs of the reference on the multi-turn workload, per CPU second.
RECORDED = {
    "look-up": 659_000.0,
    "allocate + free": 209_000.0,
    "churn": 253_000.0,
    "whole load": 477.0,
    "events made": 50_700.0,
}

Timed = tuple[int, float]
"""Things done, and the CPU seconds they took."""


DEFAULT_MOONCAKE = Path(__file__).parents[3] / "tests" / "workloads" / "mooncake_conversation_first8000.jsonl"
"""Where a checkout has it; an installed package does not."""


def kv_cache(
    *, mooncake: Path = DEFAULT_MOONCAKE, num_mooncake: int = 1000, repeats: int = REPEATS
) -> list[BenchRow]:
    """All rows. `mooncake` is a trace of that project's form; without the file its rows are left out."""
    load = [*multi_turn_requests()]
    reference = find_reference()
    try:
        rows = [*_multi_turn_rows(load, repeats, reference)]
    finally:
        if reference is not None:
            reference.close()
    del load
    if mooncake.exists():
        rows += _mooncake_rows(mooncake, num_mooncake, repeats)
    for size in POOL_SIZES:
        rows += _pool_size_rows(size, repeats)
    return rows


def _rates(works: Sequence[Callable[[], Timed]], repeats: int) -> list[float]:
    """Median rate of each work; the works take turns."""
    rates: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for found, work in zip(rates, works, strict=True):
            gc.collect()
            count, seconds = work()
            found.append(count / seconds)
    return [median(found) for found in rates]


def _manager(num_blocks: int, *, events: bool = False) -> KVCacheManager:
    return KVCacheManager(_config(num_blocks), enable_events=events)


def _config(num_blocks: int) -> KVCacheConfig:
    return KVCacheConfig(num_blocks=num_blocks, groups=[GroupSpec(block_size=BLOCK_SIZE)])


# --- multi-turn ----------------------------------------------------------------------------------


def _multi_turn_rows(
    load: Sequence[BenchRequest], repeats: int, reference: Reference | None
) -> Iterator[BenchRow]:
    warm = _manager(LARGE_POOL)
    plain_warm = PlainKVCache(_config(LARGE_POOL))
    serve(warm, load)
    serve_plain(plain_warm, load)
    num_walked = sum(warm.lookup(request).num_tokens for request in load) // BLOCK_SIZE
    works: dict[str, tuple[str, Callable[[], Timed], Callable[[], Timed]]] = {
        "look-up": (
            "block walked",
            lambda: (num_walked, _timed(lambda: [warm.lookup(request) for request in load])),
            lambda: (num_walked, _timed(lambda: [plain_warm.lookup(request) for request in load])),
        ),
        "allocate + free": (
            "new block",
            lambda: _timed_serve(_manager(LARGE_POOL), load),
            lambda: _timed_serve_plain(PlainKVCache(_config(LARGE_POOL)), load),
        ),
        "churn": (
            "new block",
            lambda: _timed_serve(_manager(SMALL_POOL), load),
            lambda: _timed_serve_plain(PlainKVCache(_config(SMALL_POOL)), load),
        ),
        "events made": (
            "event",
            lambda: _timed_events(_manager(SMALL_POOL, events=True), load),
            lambda: _timed_plain_events(PlainKVCache(_config(SMALL_POOL)), load),
        ),
    }
    for case, (thing, ours, plain) in works.items():
        value, peer_value, *real = _rates([ours, plain, *_reference_works(reference, case)], repeats)
        yield from _compared(f"multi-turn {case}", thing, value, RECORDED[case], peer_value)
        yield from _against_reference(f"multi-turn {case}", f"{thing}/s", value, real, reference)
    works_of_load = [lambda: _timed_whole_load(load), *_reference_works(reference, "whole load")]
    value, *real = _rates(works_of_load, repeats)
    yield BenchRow.higher_is_better(
        "multi-turn whole load", value, "requests/s", "reference, recorded", RECORDED["whole load"]
    )
    yield from _against_reference("multi-turn whole load", "requests/s", value, real, reference)
    yield BenchRow.higher_is_better(
        "multi-turn whole load, answer steps", value * len(load[0].answer), "steps/s"
    )


def _reference_works(reference: Reference | None, case: str) -> list[Callable[[], Timed]]:
    if reference is None:
        return []

    def work() -> Timed:
        answer = reference.ask(
            "kv-cache",
            case=case,
            none_hash=make_hasher().none_hash.hex(),
            large_pool=LARGE_POOL,
            small_pool=SMALL_POOL,
        )
        return answer["count"], answer["seconds"]

    return [work]


def _against_reference(
    case: str, unit: str, value: float, real: Sequence[float], reference: Reference | None
) -> Iterator[BenchRow]:
    for peer_value in real:
        assert reference is not None
        yield BenchRow.higher_is_better(case, value, unit, f"vLLM {reference.version}, this run", peer_value)


def _compared(case: str, thing: str, value: float, recorded: float, plain: float) -> Iterator[BenchRow]:
    rate = f"{thing}/s"
    yield BenchRow.higher_is_better(case, value, rate, "reference, recorded", recorded)
    yield BenchRow.higher_is_better(case, value, rate, "plain, this run", plain)
    yield BenchRow.lower_is_better(case, 1e9 / value, f"ns/{thing}")


def _timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _timed_serve(manager: KVCacheManager, load: Sequence[BenchRequest]) -> Timed:
    start = time.process_time()
    count = serve(manager, load)
    return count, time.process_time() - start


def _timed_serve_plain(cache: PlainKVCache, load: Sequence[BenchRequest]) -> Timed:
    start = time.process_time()
    count = serve_plain(cache, load)
    return count, time.process_time() - start


def _timed_events(manager: KVCacheManager, load: Sequence[BenchRequest]) -> Timed:
    num_events = 0
    start = time.process_time()
    for request in load:
        serve(manager, (request,))
        num_events += len(manager.take_events())
    return num_events, time.process_time() - start


def _timed_plain_events(cache: PlainKVCache, load: Sequence[BenchRequest]) -> Timed:
    num_events = 0
    start = time.process_time()
    for request in load:
        serve_plain(cache, (request,))
        num_events += len(cache.events)
        cache.events.clear()
    return num_events, time.process_time() - start


def _timed_whole_load(load: Sequence[BenchRequest]) -> Timed:
    """Admission, 64 answer steps with the token appended and hashed after each, and the end."""
    manager = _manager(LARGE_POOL)
    hasher = make_hasher()
    fresh = []
    for old in load:
        chain = hasher.resume(old.token_ids, old.block_hashes)
        fresh.append(
            BenchRequest(
                old.request_id,
                list(old.token_ids),
                old.num_prompt_tokens,
                chain.hashes,
                chain=chain,
                answer=old.answer,
            )
        )
    seconds = _timed(lambda: whole_load(manager, fresh))
    return len(fresh), seconds


# --- Mooncake ------------------------------------------------------------------------------------


def _mooncake_rows(path: Path, count: int, repeats: int) -> Iterator[BenchRow]:
    load = [*mooncake_requests(path, count)]
    name = f"mooncake, {len(load)} requests"
    for size in POOL_SIZES:
        case = f"{name}, {size:,} blocks: look up + allocate + free"
        ours, plain = _rates(
            [
                partial(_timed_walk_of, size, load),
                partial(_timed_plain_walk_of, size, load),
            ],
            repeats,
        )
        yield BenchRow.higher_is_better(case, ours, "blocks/s", "plain, this run", plain)
        yield BenchRow.lower_is_better(case, 1e9 / ours, "ns/block")


def _timed_walk_of(pool_size: int, load: Sequence[BenchRequest]) -> Timed:
    """Counts the blocks of requests that fit, hit or new."""
    manager = _manager(pool_size)
    start = time.process_time()
    num_blocks = sum(len(request.block_hashes) for request in load if serve(manager, (request,)))
    return num_blocks, time.process_time() - start


def _timed_plain_walk_of(pool_size: int, load: Sequence[BenchRequest]) -> Timed:
    cache = PlainKVCache(_config(pool_size))
    start = time.process_time()
    num_blocks = sum(len(request.block_hashes) for request in load if serve_plain(cache, (request,)))
    return num_blocks, time.process_time() - start


# --- growth with the pool ------------------------------------------------------------------------


NUM_TIMED = 200  # Prompts that are timed on the full pool.


def _pool_size_rows(num_blocks: int, repeats: int) -> Iterator[BenchRow]:
    """A full pool; then resident prompts are looked up, and new ones push the oldest out."""
    filling = [*unlike_prompts("old", num_blocks // PROMPT_BLOCKS + 1)]
    arriving = [*unlike_prompts("new", NUM_TIMED)]
    manager = _manager(num_blocks)
    serve(manager, filling)
    resident = [r for r in filling[-NUM_TIMED - 1 : -1] if manager.lookup(r).num_tokens]
    resident *= -(-NUM_TIMED // len(resident))

    def look_up() -> Timed:
        seconds = _timed(lambda: [manager.lookup(request) for request in resident])
        return len(resident) * (PROMPT_BLOCKS - 1), seconds

    def push_out() -> Timed:
        seconds = _timed(lambda: serve(manager, arriving))
        manager.evict([BlockId(i) for i in range(1, num_blocks)])
        serve(manager, filling)
        return len(arriving) * PROMPT_BLOCKS, seconds

    looked_up, taken = _rates([look_up, push_out], repeats)
    ours = _traced_bytes(lambda: _filled(_manager(num_blocks), filling)) / num_blocks
    plain = None
    if num_blocks <= LARGE_POOL:
        plain = _traced_bytes(lambda: _filled_plain(PlainKVCache(_config(num_blocks)), filling)) / num_blocks
    name = f"{num_blocks:,} blocks"
    yield BenchRow.lower_is_better(f"{name}: look up", 1e9 / looked_up, "ns/block")
    yield BenchRow.lower_is_better(f"{name}: take, evict, enter, free", 1e9 / taken, "ns/block")
    case = f"{name}: memory, hashes not counted"
    yield BenchRow.lower_is_better(case, ours, "bytes/block", "plain, this run", plain)


def _filled(manager: KVCacheManager, load: Sequence[BenchRequest]) -> KVCacheManager:
    serve(manager, load)
    return manager


def _filled_plain(cache: PlainKVCache, load: Sequence[BenchRequest]) -> PlainKVCache:
    serve_plain(cache, load)
    return cache


def _traced_bytes(make: Callable[[], object]) -> int:
    """Bytes that the made thing holds, beyond what was there before."""
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del made
    return held
