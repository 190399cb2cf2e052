"""What the store says of a Redis' maxmemory-policy."""

import pytest

from reprise_store.adapters.redis_backend import MemoryPolicy

GIB = 1024**3


@pytest.mark.parametrize(
    ("max_bytes", "policy", "blocks_expire", "said"),
    [
        (0, "noeviction", True, ()),
        (GIB, "volatile-lru", True, ()),
        (GIB, "volatile-ttl", True, ()),
        (GIB, "noeviction", True, ("saves fail", "to volatile-lru")),
        (GIB, "volatile-lru", False, ("saves fail", "BLOCK_TTL_S above 0")),
        (GIB, "allkeys-lru", True, ("generation", "to volatile-lru")),
        (GIB, "allkeys-random", False, ("generation", "BLOCK_TTL_S above 0")),
    ],
)
def test_advice(max_bytes: int, policy: str, blocks_expire: bool, said: tuple[str, ...]) -> None:
    advice = MemoryPolicy("a:1", max_bytes, policy).advice(blocks_expire=blocks_expire)
    assert all(words in advice for words in said)
    assert bool(advice) == bool(said)
