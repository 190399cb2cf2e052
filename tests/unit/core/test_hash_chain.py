import random

import pytest

from reprise_core.errors import InvalidInput
from reprise_core.extra_keys import HashInputs, LoraAdapter, MmItem, PromptEmbeds
from reprise_core.hash_algorithms import HashAlgorithm, external_hash
from reprise_core.hash_chain import BlockHasher, coarse_view
from reprise_core.ids import BlockHash
from reprise_core.none_hash import none_hash

ALGORITHMS = list(HashAlgorithm)


def hasher(
    algorithm: HashAlgorithm = HashAlgorithm.SHA256, block_size: int = 4, lookahead: int = 0
) -> BlockHasher:
    return BlockHasher(
        algorithm=algorithm,
        block_size=block_size,
        none_hash=none_hash(algorithm, "seed"),
        lookahead=lookahead,
    )


def test_only_full_blocks_are_hashed() -> None:
    chain = hasher().chain()
    assert chain.append([1, 2, 3]) == []
    (first,) = chain.append([4])
    assert chain.append([5, 6, 7]) == []
    assert chain.hashes == [first]
    assert chain.num_tokens == 7


def test_a_block_covers_all_tokens_before_it() -> None:
    one = hasher().chain().append([1, 2, 3, 4, 9, 9, 9, 9])
    other = hasher().chain().append([1, 2, 3, 5, 9, 9, 9, 9])
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_equal_blocks_of_one_prompt_have_different_hashes() -> None:
    """sglang#13488: hashes of content alone made repeated blocks refer to themselves."""
    assert len(set(hasher(block_size=4).chain().append([7] * 32))) == 8


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_in_pieces_as_in_one(algorithm: HashAlgorithm, lookahead: int) -> None:
    rng = random.Random(1)
    inputs = HashInputs(lora=LoraAdapter("a", 1, "/a"), mm=(MmItem("x", 3, 9),), cache_salt="s")
    token_ids = [rng.randrange(200_000) for _ in range(201)]
    whole = hasher(algorithm, 8, lookahead).chain(inputs)
    whole.append(token_ids)
    for _ in range(20):
        chain = hasher(algorithm, 8, lookahead).chain(inputs)
        position = 0
        while position < len(token_ids):
            step = rng.choice([1, 1, 1, 2, 7, 8, 9, 40])
            new = chain.append(token_ids[position : position + step])
            position += step
            assert chain.hashes[len(chain.hashes) - len(new) :] == new
            assert len(chain.hashes) == max(0, chain.num_tokens - lookahead) // 8
        assert chain.hashes == whole.hashes
        assert chain.num_tokens == len(token_ids)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("num_known", [0, 1, 3, 5])
def test_resume_goes_on_where_another_process_stopped(
    algorithm: HashAlgorithm, lookahead: int, num_known: int
) -> None:
    inputs = HashInputs(mm=(MmItem("x", 6, 3), MmItem("y", 18, 4)), cache_salt="s")
    token_ids = list(range(23))
    whole = hasher(algorithm, 4, lookahead).chain(inputs)
    whole.append(token_ids)
    resumed = hasher(algorithm, 4, lookahead).resume(token_ids, whole.hashes[:num_known], inputs)
    assert resumed.hashes == whole.hashes
    assert resumed.num_tokens == whole.num_tokens
    assert resumed.append(range(9)) == whole.append(range(9))


def test_resume_refuses_what_cannot_be() -> None:
    right = hasher().chain().append(range(8))
    with pytest.raises(InvalidInput, match="2 hashes, 7 tokens fill 1 blocks"):
        hasher().resume(range(7), right)
    with pytest.raises(InvalidInput, match=r"block_hashes\[0\]: 5 bytes, sha256 digests have 32"):
        hasher().resume(range(8), [BlockHash(b"short")])


def test_a_refused_append_leaves_the_chain_as_it_was() -> None:
    chain = hasher().chain()
    chain.append([1, 2, 3])
    for bad in ([4, -1], [4, 5, 6, 7, 8, 9, "x"], [True], [None], [1.5]):
        with pytest.raises(InvalidInput, match="token_ids"):
            chain.append(bad)  # type: ignore[arg-type]
    assert chain.append([4, 5]) == hasher().chain().append([1, 2, 3, 4])
    assert chain.num_tokens == 5


@pytest.mark.parametrize("field", ["block_size", "lookahead", "none_hash"])
def test_settings_are_checked(field: str) -> None:
    good: dict[str, object] = {
        "algorithm": HashAlgorithm.XXHASH,
        "block_size": 4,
        "none_hash": none_hash(HashAlgorithm.XXHASH, "seed"),
        "lookahead": 0,
    }
    bad = {"block_size": 0, "lookahead": -1, "none_hash": b"1"}
    with pytest.raises(InvalidInput, match=field):
        BlockHasher(**{**good, field: bad[field]})  # type: ignore[arg-type]


def test_embedding_positions_are_hashed_as_token_0() -> None:
    embeds = PromptEmbeds("float32", (6, 2), bytes(range(48)), (True, False, True, False, True, True))
    inputs = HashInputs(prompt_embeds=embeds)
    in_one = hasher().chain(inputs).append([1, 2, 3, 4, 5, 6, 7, 8])
    in_pieces = hasher().chain(inputs)
    for token in (1, 99, 3, 98, 5, 6, 7, 8):
        in_pieces.append([token])
    assert in_pieces.hashes == in_one


def test_a_coarser_view_takes_the_hash_at_each_coarse_end() -> None:
    fine = hasher(block_size=4).chain().append(range(44))
    assert coarse_view(fine, 4) == [fine[3], fine[7]]
    assert coarse_view(fine, 1) == fine


def test_the_external_form_is_the_last_8_bytes() -> None:
    assert external_hash(BlockHash(bytes(24) + b"\xff" * 8)) == 2**64 - 1
    assert external_hash(BlockHash(bytes(8) + b"\x01" + bytes(7))) == 2**56


def test_profiles_agree_where_they_must() -> None:
    """Two processes with one profile share blocks; profiles that differ in anything share none."""
    token_ids = list(range(64))
    profiles = {
        (algorithm, seed, block_size): BlockHasher(
            algorithm=algorithm, block_size=block_size, none_hash=none_hash(algorithm, seed)
        )
        for algorithm in ALGORITHMS
        for seed in ("0", "1")
        for block_size in (8, 16)
    }
    seen: set[bytes] = set()
    for (algorithm, seed, block_size), profile in profiles.items():
        again = BlockHasher(algorithm=algorithm, block_size=block_size, none_hash=none_hash(algorithm, seed))
        hashes = profile.chain().append(token_ids)
        assert hashes == again.chain().append(token_ids)
        assert seen.isdisjoint(hashes)
        seen.update(hashes)
