"""Every benchmark by name."""

from collections.abc import Callable, Sequence

from reprise_cli.bench.report import BenchRow


def benches() -> dict[str, Callable[[], Sequence[BenchRow]]]:
    from reprise_cli.bench.hashing import hashing_append_rows, hashing_limit_rows, hashing_rows
    from reprise_cli.bench.kv_cache import kv_cache
    from reprise_cli.bench.step import step_rows

    return {
        "hashing": hashing_rows,
        "hashing-limit": hashing_limit_rows,
        "hashing-append": hashing_append_rows,
        "kv-cache": kv_cache,
        "step": step_rows,
    }
