"""Requests that could be confused share no block: from the hasher through the cache manager."""

import unicodedata

import pytest

from reprise_core.extra_keys import HashInputs, LoraAdapter, MmItem
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.hash_chain import BlockHasher
from reprise_core.none_hash import none_hash
from reprise_scheduler.kv_cache.config import GroupKind, GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager
from unit.scheduler.kv_cache.simple_request import SimpleRequest

BLOCK_SIZE = 4
TOKENS = [*range(24)]
FULL = (GroupSpec(block_size=BLOCK_SIZE),)
HYBRID = (*FULL, GroupSpec(kind=GroupKind.SLIDING, block_size=BLOCK_SIZE, window=9))


def lora(name: str, path: str = "/p", int_id: int = 1) -> HashInputs:
    return HashInputs(lora=LoraAdapter(name, int_id, path))


def image(identifier: str, offset: int = 0) -> HashInputs:
    return HashInputs(mm=(MmItem(identifier, offset, 4),))


COMPOSED = unicodedata.normalize("NFC", "café")
DECOMPOSED = unicodedata.normalize("NFD", "café")

CONFUSABLE = {
    "an adapter's name and a salt": (lora("tenant-a"), HashInputs(cache_salt="tenant-a")),
    "an adapter's path and a salt": (lora("x", "tenant-a"), HashInputs(cache_salt="tenant-a")),
    "a salt and an image": (HashInputs(cache_salt="ab" * 32), image("ab" * 32)),
    "name and path the other way round": (lora("a", "b"), lora("b", "a")),
    "name and path cut elsewhere": (lora("ab", "c"), lora("a", "bc")),
    "one name with two paths": (lora("a", "/one"), lora("a", "/two")),
    "a tag as a salt": (HashInputs(cache_salt="lora"), HashInputs(cache_salt="cache_salt")),
    "a salt and none": (HashInputs(cache_salt=" "), HashInputs()),
    "an adapter and none": (lora("a"), HashInputs()),
    "salts that normalise alike": (HashInputs(cache_salt=COMPOSED), HashInputs(cache_salt=DECOMPOSED)),
    "adapters that normalise alike": (lora(COMPOSED), lora(DECOMPOSED)),
    "salts that fold alike": (HashInputs(cache_salt="ſ"), HashInputs(cache_salt="s")),
    "compatible letters": (HashInputs(cache_salt="ﬁ"), HashInputs(cache_salt="fi")),
    "a salt that ends with a zero": (HashInputs(cache_salt="a"), HashInputs(cache_salt="a\0")),
    "images equal in their last 16 bits": (image("11" * 30 + "abcd"), image("22" * 30 + "abcd")),
    "one image at two places": (image("ab", 0), image("ab", 1)),
}
SHARED = {
    "an empty salt and none": (HashInputs(cache_salt=""), HashInputs()),
    "one adapter under two numbers": (lora("a", int_id=1), lora("a", int_id=2)),
}


def request(name: str, inputs: HashInputs, algorithm: HashAlgorithm) -> SimpleRequest:
    """With the hasher's own hashes."""
    hasher = BlockHasher(algorithm=algorithm, block_size=BLOCK_SIZE, none_hash=none_hash(algorithm, "seed"))
    hashed = hasher.chain(inputs).append(TOKENS)
    made = SimpleRequest(name, [*TOKENS], BLOCK_SIZE, inputs.cache_salt, inputs.lora)
    made.hashed = hashed
    return made


def hit_of_second(
    pair: tuple[HashInputs, HashInputs],
    algorithm: HashAlgorithm,
    groups: tuple[GroupSpec, ...],
    *,
    verify: bool,
) -> tuple[int, int]:
    """Tokens that the second hits of the first, and collisions noticed."""
    manager = KVCacheManager(KVCacheConfig(num_blocks=40, groups=groups, verify_tokens=verify))
    first, second = (request(f"r{index}", inputs, algorithm) for index, inputs in enumerate(pair))
    assert manager.allocate(first, len(TOKENS), num_computed_tokens=0) is not None
    return manager.lookup(second).num_tokens, manager.num_collisions


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("algorithm", list(HashAlgorithm))
@pytest.mark.parametrize("case", CONFUSABLE)
def test_they_share_no_block(case: str, algorithm: HashAlgorithm, groups: tuple[GroupSpec, ...]) -> None:
    pair = CONFUSABLE[case]
    for first, second in (pair, pair[::-1]):
        assert hit_of_second((first, second), algorithm, groups, verify=False) == (0, 0)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("algorithm", list(HashAlgorithm))
@pytest.mark.parametrize("case", SHARED)
def test_what_is_the_same_shares_all(case: str, algorithm: HashAlgorithm, verify: bool) -> None:
    pair = SHARED[case]
    num_hit, num_collisions = hit_of_second(pair, algorithm, FULL, verify=verify)
    assert (num_hit, num_collisions) == (len(TOKENS) - BLOCK_SIZE, 0)
