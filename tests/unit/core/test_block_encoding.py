"""Every encoder gives what the plain one gives, for any tokens, keys and block size."""

import enum
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reprise_core.block_encoding import BlockEncoder, PlainEncoder, checked_token_ids
from reprise_core.errors import InvalidInput
from reprise_core.extra_keys import HashInputs, LoraAdapter, MmItem, PromptEmbeds
from reprise_core.hash_algorithms import HashAlgorithm, digest_value
from reprise_core.hash_chain import BlockHasher
from reprise_core.native_encoding import Encoding, available_encodings, make_encoder
from reprise_core.none_hash import none_hash

ALGORITHMS = list(HashAlgorithm)
# Borders of CBOR and pickle widths, and numbers whose bytes look like the markers.
BORDERS = [0, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
MARKER_LIKE = [
    2**64 - 1,
    2**64 - 1 - 0xFF + 0x90,
    2**64 - 1 - 0xFF + 0x82,
    0x00FF_FFFF,
    0x7FFF_FFFF,
    0x94FF_FFFF,
    int.from_bytes(b"J\xff\xff\xff\x94\x00", "little"),
    int.from_bytes(b"\x1b" + b"\xff" * 9, "big"),
    # What stands between two pickled blocks, within one number.
    int.from_bytes(b"t\x94(\x00", "little"),
    int.from_bytes(b"\x00t\x94(", "little"),
    int.from_bytes(b"\x8at\x94(\x94(t\x94", "little"),
    int.from_bytes(b"t\x94", "little"),
]
HUGE = [2**64, 2**64 + 1, 2**200, 2**2040 - 1, 2**2048, 2**9000]

token_ids_strategy = st.lists(
    st.one_of(
        st.sampled_from(BORDERS + MARKER_LIKE + HUGE),
        st.integers(0, 200_000),
        st.integers(0, 2**70),
    ),
    max_size=80,
)
texts = st.one_of(st.text(max_size=6), st.sampled_from(["a", "é", "", "x" * 300, "lora", "mm", "\U0001f600"]))


@st.composite
def hash_inputs(draw: st.DrawFn) -> HashInputs:
    lora = draw(st.none() | st.builds(LoraAdapter, name=texts, int_id=st.just(1), path=texts))
    items: list[MmItem] = []
    position = 0
    for _ in range(draw(st.integers(0, 4))):
        position += draw(st.integers(0, 9))
        length = draw(st.integers(0, 30))
        items.append(MmItem(draw(texts), position, length))
        position += length
    embeds = draw(
        st.none() | st.builds(PromptEmbeds, st.just("float16"), st.just((7, 1)), st.just(bytes(14)))
    )
    salt = draw(st.none() | texts)
    return HashInputs(lora, tuple(items), salt, embeds, draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    block_size=st.integers(1, 20),
    lookahead=st.sampled_from([0, 0, 1, 3]),
    token_ids=token_ids_strategy,
    repeats=st.sampled_from([1, 1, 5, 20]),
    inputs=hash_inputs(),
)
@example(HashAlgorithm.SHA256, 2, 0, MARKER_LIKE, 5, HashInputs())
@example(HashAlgorithm.SHA256_CBOR, 2, 0, MARKER_LIKE, 5, HashInputs())
@example(HashAlgorithm.SHA256, 3, 0, HUGE, 20, HashInputs(cache_salt="s"))
@example(HashAlgorithm.XXHASH_CBOR, 16, 0, BORDERS, 20, HashInputs())
def test_every_encoder_equals_the_plain_one(
    algorithm: HashAlgorithm,
    block_size: int,
    lookahead: int,
    token_ids: list[int],
    repeats: int,
    inputs: HashInputs,
) -> None:
    plain, *others = (
        BlockHasher(
            algorithm=algorithm,
            block_size=block_size,
            none_hash=none_hash(algorithm, "seed"),
            lookahead=lookahead,
            encoding=encoding,
        )
        for encoding in available_encodings(algorithm)
    )
    prompt = token_ids * repeats
    expected = plain.chain(inputs).append(prompt)
    for hasher in others:
        assert hasher.chain(inputs).append(prompt) == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_plain_one_follows_the_definition(algorithm: HashAlgorithm) -> None:
    parent = none_hash(algorithm, "seed")
    first = digest_value(algorithm, (parent, (1, 2), None))
    second = digest_value(algorithm, (first, (3, 4), (("cache_salt", "s"),)))
    encoder = PlainEncoder(algorithm, 2)
    assert encoder.hash_blocks(parent, [1, 2, 3, 4], 2, [None, (("cache_salt", "s"),)]) == [first, second]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16, 23, 24, 255, 256, 4096, 4097, 20_000])
def test_block_sizes_and_many_chunks(algorithm: HashAlgorithm, block_size: int) -> None:
    """Lengths around the chunk size, the short tuple forms, bodies beyond one pickle frame."""
    parent = none_hash(algorithm, "seed")
    token_ids = [(7919 * index) % 150_000 for index in range(max(3 * 16_384 + 5, 14 * block_size))]
    num_blocks = len(token_ids) // block_size
    plain, *others = encoders(algorithm, block_size)
    expected = plain.hash_blocks(parent, token_ids, num_blocks, None)
    for encoder in others:
        assert encoder.hash_blocks(parent, token_ids, num_blocks, None) == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("nbytes", [200, 8_000, 65_000, 65_400, 65_536, 70_000])
def test_keys_near_the_limit_of_a_pickle_frame(algorithm: HashAlgorithm, nbytes: int) -> None:
    parent = none_hash(algorithm, "seed")
    extras = [(("lora", "n" * nbytes, "p"),)] * 20
    token_ids = list(range(320))
    plain, *others = encoders(algorithm, 16)
    expected = plain.hash_blocks(parent, token_ids, 20, extras)
    for encoder in others:
        assert encoder.hash_blocks(parent, token_ids, 20, extras) == expected


# Everything that may come instead of a token id, good ids among it.
junk = st.one_of(
    st.sampled_from([*BORDERS, *HUGE, -1, -(2**31), -(2**63), -(2**64)]),
    st.integers(-(2**70), 2**70),
    st.booleans(),
    st.none(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from([2**31, 2**40]).map(str),
)


@settings(max_examples=300, deadline=None)
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    block_size=st.integers(1, 8),
    good=st.lists(st.integers(0, 200_000), min_size=1, max_size=40),
    bad=st.lists(st.tuples(st.integers(0, 500), junk), max_size=3),
)
def test_whatever_comes_there_is_a_clear_error_or_the_right_hash(
    algorithm: HashAlgorithm, block_size: int, good: list[int], bad: list[tuple[int, object]]
) -> None:
    prompt: list[object] = [*good * 5]
    for place, value in bad:
        prompt[place % len(prompt)] = value
    is_good = all(type(token) is int and token >= 0 for token in prompt)
    for encoding in available_encodings(algorithm):
        chain = BlockHasher(
            algorithm=algorithm,
            block_size=block_size,
            none_hash=none_hash(algorithm, "seed"),
            encoding=encoding,
        ).chain()
        if not is_good:
            with pytest.raises(InvalidInput, match=r"^token_ids\[\d+\]: "):
                chain.append(prompt)  # type: ignore[arg-type]
            assert (chain.hashes, chain.num_tokens) == ([], 0)
            continue
        parent = none_hash(algorithm, "seed")
        for index, block_hash in enumerate(chain.append(prompt)):  # type: ignore[arg-type]
            block = tuple(prompt[index * block_size : (index + 1) * block_size])
            parent = digest_value(algorithm, (parent, block, None))
            assert block_hash == parent


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_trusted_ids_give_the_same_hashes(algorithm: HashAlgorithm) -> None:
    token_ids = [(7919 * index) % 150_000 for index in range(20_000)]
    for encoding in available_encodings(algorithm):
        hasher = BlockHasher(
            algorithm=algorithm, block_size=16, none_hash=none_hash(algorithm, "seed"), encoding=encoding
        )
        chain, trusting = hasher.chain(), hasher.chain()
        for start, end in [(0, 17_003), (17_003, 17_004), (17_004, 17_050), (17_050, 20_000)]:
            piece = token_ids[start:end]
            assert trusting.append(piece, trusted=True) == chain.append(piece)
            piece[0] = 5  # The caller's list is its own.
        assert (trusting.hashes, trusting.num_tokens) == (chain.hashes, 20_000)


def encoders(algorithm: HashAlgorithm, block_size: int) -> list[BlockEncoder]:
    return [make_encoder(algorithm, block_size, encoding) for encoding in available_encodings(algorithm)]


class Id(int):
    pass


class Color(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "good", [(1, 2, 3), [1, 2, 3], range(1, 4), array("i", [1, 2, 3]), [Id(1), 2, 3], [Color.ONE, 2, 3]]
)
def test_what_holds_plain_numbers_is_taken_as_them(good: Sequence[int]) -> None:
    checked = checked_token_ids(good)
    assert checked == [1, 2, 3]
    assert {type(token) for token in checked} == {int}


@pytest.mark.parametrize(
    ("bad", "field", "problem"),
    [
        ([1, -1], r"token_ids\[1\]", "-1, must be at least 0"),
        ([-(2**70)], r"token_ids\[0\]", "must be at least 0"),
        ([True], r"token_ids\[0\]", "bool, must be an int"),
        ([1, 1.0], r"token_ids\[1\]", "float, must be an int"),
        (["1"], r"token_ids\[0\]", "str, must be an int"),
        ([None], r"token_ids\[0\]", "NoneType, must be an int"),
        ([[1]], r"token_ids\[0\]", "list, must be an int"),
        ("ab", r"token_ids\[0\]", "str, must be an int"),
        (5, "token_ids", "int, must be a sequence"),
        (None, "token_ids", "NoneType, must be a sequence"),
    ],
)
def test_what_is_no_token_id_is_named(bad: object, field: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=f"{field}.*{problem}"):
        checked_token_ids(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", available_encodings(HashAlgorithm.SHA256))
@pytest.mark.parametrize("position", [0, 17, 47, 48, 50])
@pytest.mark.parametrize("bad", [-1, True, 1.0, "1", None, -(2**70)])
def test_a_bad_id_anywhere_in_a_prompt_is_named_and_nothing_is_kept(
    encoding: Encoding, position: int, bad: object
) -> None:
    algorithm = HashAlgorithm.SHA256
    hasher = BlockHasher(
        algorithm=algorithm, block_size=16, none_hash=none_hash(algorithm, "seed"), encoding=encoding
    )
    chain = hasher.chain()
    prompt: list[object] = list(range(52))
    prompt[position] = bad
    with pytest.raises(InvalidInput, match=rf"^token_ids\[{position}\]:"):
        chain.append(prompt)  # type: ignore[arg-type]
    assert (chain.hashes, chain.num_tokens) == ([], 0)
    assert chain.append(list(range(52))) == hasher.chain().append(tuple(range(52)))


@pytest.mark.parametrize("encoding", available_encodings(HashAlgorithm.SHA256))
@pytest.mark.parametrize("position", [3, 33])
def test_an_int_of_another_class_counts_as_its_value(encoding: Encoding, position: int) -> None:
    algorithm = HashAlgorithm.SHA256
    hasher = BlockHasher(
        algorithm=algorithm, block_size=16, none_hash=none_hash(algorithm, "seed"), encoding=encoding
    )
    prompt = list(range(34))
    prompt[position] = Id(position)
    chain = hasher.chain()
    chain.append(prompt)
    chain.append(list(range(14)))
    assert chain.hashes == hasher.chain().append([*range(34), *range(14)])


def test_the_accelerator_is_refused_by_name_where_it_is_not_built() -> None:
    for algorithm in ALGORITHMS:
        if Encoding.NATIVE not in available_encodings(algorithm):
            with pytest.raises(InvalidInput, match="encoding: the accelerator for"):
                make_encoder(algorithm, 16, Encoding.NATIVE)
        assert make_encoder(algorithm, 16, Encoding.AUTO) is not None
