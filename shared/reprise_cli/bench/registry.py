"""Every benchmark by name."""

from collections.abc import Callable, Sequence
from functools import partial

from reprise_cli.bench.report import BenchRow


def benches(*, policies: Sequence[str] = ()) -> dict[str, Callable[[], Sequence[BenchRow]]]:
    """`policies` are for `eviction`: eviction policies by name, `module:Class`."""
    from reprise_cli.bench.events import events_rows
    from reprise_cli.bench.eviction import eviction
    from reprise_cli.bench.first_token import first_token_rows
    from reprise_cli.bench.hashing import hashing_append_rows, hashing_limit_rows, hashing_rows
    from reprise_cli.bench.kv_cache import kv_cache
    from reprise_cli.bench.split import split_rows
    from reprise_cli.bench.step import step_rows
    from reprise_cli.bench.store import store_rows

    return {
        "hashing": hashing_rows,
        "hashing-limit": hashing_limit_rows,
        "hashing-append": hashing_append_rows,
        "kv-cache": kv_cache,
        "events": events_rows,
        "eviction": partial(eviction, policies),
        "step": step_rows,
        "split": split_rows,
        "store": store_rows,
        "first-token": first_token_rows,
    }
