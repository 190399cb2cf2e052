"""Hashes under the profiles that a caller names."""

import pytest

from reprise_core.errors import InvalidInput
from reprise_core.extra_keys import HashInputs
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.hash_chain import BlockHasher
from reprise_core.none_hash import none_hash
from reprise_tokenizer.prompt_hashes import PromptHasher
from reprise_wire.hash_profiles import HashProfile, HashRequest


def _profile(name: str, algorithm: HashAlgorithm, block_size: int, seed: str = "s") -> HashProfile:
    return HashProfile(name, algorithm, block_size, none_hash(algorithm, seed))


FINE = _profile("fine", HashAlgorithm.SHA256, 4)
COARSE = _profile("coarse", HashAlgorithm.XXHASH_CBOR, 16)


def test_one_pass_per_distinct_profile() -> None:
    token_ids = list(range(35))
    request = HashRequest((FINE, COARSE, FINE), cache_salt="salt")
    hashes = PromptHasher(max_profiles=2).hash(token_ids, request)
    assert [one.profile_id for one in hashes] == ["fine", "coarse"]
    for profile, one in zip((FINE, COARSE), hashes, strict=True):
        hasher = BlockHasher(
            algorithm=profile.algorithm, block_size=profile.hash_block_size, none_hash=profile.none_hash
        )
        expected = hasher.chain(HashInputs(cache_salt="salt")).append(token_ids)
        assert one.digests == b"".join(expected)
        assert len(one.digests) == 35 // profile.hash_block_size * profile.algorithm.digest_nbytes


def test_too_many_profiles_and_a_bad_one_are_refused() -> None:
    with pytest.raises(InvalidInput, match="profiles: 2, at most 1"):
        PromptHasher(max_profiles=1).hash([1], HashRequest((FINE, COARSE)))
    bad = HashProfile("bad", HashAlgorithm.SHA256, 0, FINE.none_hash)
    with pytest.raises(InvalidInput, match="block_size"):
        PromptHasher(max_profiles=1).hash([1], HashRequest((bad,)))


def test_engines_with_random_seeds_do_not_pile_up() -> None:
    hasher = PromptHasher(max_profiles=1)
    for i in range(200):
        profile = _profile(str(i), HashAlgorithm.XXHASH, 4, seed=str(i))
        assert hasher.hash(range(8), HashRequest((profile,)))[0].profile_id == str(i)
    assert len(hasher._hashers) <= 64
