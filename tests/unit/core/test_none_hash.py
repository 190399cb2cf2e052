import pytest

from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.none_hash import none_hash, seed_text

ALGORITHMS = list(HashAlgorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("pythonhashseed", ["0", "42", "", "random", "any text"])
def test_pythonhashseed_overrides_for_every_algorithm(algorithm: HashAlgorithm, pythonhashseed: str) -> None:
    assert seed_text(algorithm, pythonhashseed) == pythonhashseed


def test_without_it_cryptographic_seeds_are_fixed_and_others_must_be_drawn() -> None:
    assert seed_text(HashAlgorithm.SHA256, None) == seed_text(HashAlgorithm.SHA256_CBOR, None) is not None
    assert seed_text(HashAlgorithm.XXHASH, None) is None
    assert seed_text(HashAlgorithm.XXHASH_CBOR, None) is None


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_hash_is_a_digest_of_the_text(algorithm: HashAlgorithm) -> None:
    first, second = none_hash(algorithm, "a"), none_hash(algorithm, "b")
    assert len(first) == len(second) == algorithm.digest_nbytes
    assert first != second
    assert none_hash(algorithm, "a") == first
