"""What must tell blocks apart, what must not, and that nothing depends on where a string came from."""

import sys

import pytest

from reprise_core.errors import InvalidInput
from reprise_core.extra_keys import (
    HashInputs,
    LoraAdapter,
    MmItem,
    PromptEmbeds,
    event_extra_keys,
    hashed_extra_keys,
)
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.hash_chain import BlockHasher
from reprise_core.ids import BlockHash
from reprise_core.native_encoding import Encoding, available_encodings
from reprise_core.none_hash import none_hash

ALGORITHMS = list(HashAlgorithm)
TOKENS = [7] * 32


def hashes(
    algorithm: HashAlgorithm,
    inputs: HashInputs,
    block_size: int = 16,
    encoding: Encoding = Encoding.AUTO,
) -> list[BlockHash]:
    hasher = BlockHasher(
        algorithm=algorithm, block_size=block_size, none_hash=none_hash(algorithm, "seed"), encoding=encoding
    )
    return hasher.chain(inputs).append(TOKENS)


def lora(name: str, path: str = "/p", int_id: int = 1) -> HashInputs:
    return HashInputs(lora=LoraAdapter(name, int_id, path))


CONFUSABLE = [
    ("vllm#44701: adapter name and salt", lora("X", "X"), HashInputs(cache_salt="X")),
    ("adapter name and image", lora("X"), HashInputs(mm=(MmItem("X", 0, 1),))),
    ("image and salt", HashInputs(mm=(MmItem("X", 0, 1),)), HashInputs(cache_salt="X")),
    ("name and path swapped", lora("a", "b"), lora("b", "a")),
    ("same name, other path", lora("a", "/v1"), lora("a", "/v2")),
    (
        "salt of an adapter's request and of the base model's",
        HashInputs(lora=LoraAdapter("a", 1, "b"), cache_salt="c"),
        HashInputs(lora=LoraAdapter("a", 1, "c"), cache_salt="b"),
    ),
    ("unicode that normalises alike", HashInputs(cache_salt="é"), HashInputs(cache_salt="e\u0301")),
    ("letter case", HashInputs(cache_salt="Tenant"), HashInputs(cache_salt="tenant")),
    ("trailing space", HashInputs(cache_salt="t"), HashInputs(cache_salt="t ")),
    ("a salt that looks like none", HashInputs(cache_salt="None"), HashInputs()),
    ("a tag as a salt", HashInputs(cache_salt="cache_salt"), HashInputs(cache_salt="mm")),
    (
        "one image at another place",
        HashInputs(mm=(MmItem("x", 0, 4),)),
        HashInputs(mm=(MmItem("x", 1, 4),)),
    ),
    (
        "embeddings that differ in one bit",
        HashInputs(prompt_embeds=PromptEmbeds("float16", (32, 1), bytes(64))),
        HashInputs(prompt_embeds=PromptEmbeds("float16", (32, 1), b"\x01" + bytes(63))),
    ),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("one", "other"), [pair[1:] for pair in CONFUSABLE], ids=[p[0] for p in CONFUSABLE])
def test_requests_that_could_be_confused_share_no_block(
    algorithm: HashAlgorithm, one: HashInputs, other: HashInputs
) -> None:
    assert set(hashes(algorithm, one)).isdisjoint(hashes(algorithm, other))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_empty_salt_is_no_salt(algorithm: HashAlgorithm) -> None:
    assert hashes(algorithm, HashInputs(cache_salt="")) == hashes(algorithm, HashInputs())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_adapter_number_of_an_engine_does_not_count(algorithm: HashAlgorithm) -> None:
    assert hashes(algorithm, lora("a", int_id=1)) == hashes(algorithm, lora("a", int_id=2))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_images_equal_in_their_last_bits_share_only_the_text_before(algorithm: HashAlgorithm) -> None:
    """LMCache#4086: identities were cut to 16 bits."""
    one = hashes(algorithm, HashInputs(mm=(MmItem("11" * 30 + "abcd", 20, 4),)), block_size=8)
    other = hashes(algorithm, HashInputs(mm=(MmItem("22" * 30 + "abcd", 20, 4),)), block_size=8)
    assert one[:2] == other[:2]
    assert set(one[2:]).isdisjoint(other[2:])


@pytest.mark.parametrize("encoding", available_encodings(HashAlgorithm.SHA256))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_hash_does_not_depend_on_where_a_string_came_from(
    algorithm: HashAlgorithm, encoding: Encoding
) -> None:
    """Pickle writes one object once and then refers to it; so the hasher makes its own objects."""
    shared = sys.intern("shared-text")
    parts = ["".join(["shared", "-", "text"]) for _ in range(5)]
    from_one_object = HashInputs(
        lora=LoraAdapter(shared, 1, shared),
        mm=(MmItem(shared, 0, 3), MmItem(shared, 5, 3)),
        cache_salt=shared,
    )
    from_many = HashInputs(
        lora=LoraAdapter(parts[0], 1, parts[1]),
        mm=(MmItem(parts[2], 0, 3), MmItem(parts[3], 5, 3)),
        cache_salt=parts[4],
    )
    assert hashes(algorithm, from_one_object, encoding=encoding) == hashes(
        algorithm, from_many, encoding=encoding
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_tag_as_a_value_is_another_object_than_the_tag(algorithm: HashAlgorithm) -> None:
    """An adapter called "lora", from an interned and from a decoded text."""
    decoded = b"lora".decode()
    assert hashes(algorithm, lora("lora", "lora")) == hashes(algorithm, lora(decoded, decoded))


def test_one_identifier_object_is_a_choice_that_only_pickle_sees() -> None:
    items = (MmItem("image", 0, 3), MmItem("image", 5, 3))
    for algorithm in ALGORITHMS:
        separate = hashes(algorithm, HashInputs(mm=items))
        one_object = hashes(algorithm, HashInputs(mm=items, same_identifier_object=True))
        assert (separate == one_object) is algorithm.is_cbor


def test_one_character_texts_are_one_object_anyway() -> None:
    """The interpreter keeps one object for each Latin-1 character; the reference sees that too."""
    items = (MmItem("x", 0, 3), MmItem("x", 5, 3))
    separate = hashes(HashAlgorithm.SHA256, HashInputs(mm=items))
    assert separate == hashes(HashAlgorithm.SHA256, HashInputs(mm=items, same_identifier_object=True))


def test_keys_of_blocks() -> None:
    inputs = HashInputs(
        lora=LoraAdapter("ad", 3, "/ad"), mm=(MmItem("i1", 2, 4), MmItem("i2", 6, 2)), cache_salt="s"
    )
    assert hashed_extra_keys(inputs, block_size=4, first_block=0, num_blocks=3) == [
        (("lora", "ad", "/ad"), ("mm", "i1", 2), ("cache_salt", "s")),
        (("lora", "ad", "/ad"), ("mm", "i1", -2), ("mm", "i2", 2)),
        (("lora", "ad", "/ad"),),
    ]
    assert event_extra_keys(inputs, block_size=4, first_block=1, num_blocks=2) == (
        ("ad", ("i1", -2), ("i2", 2)),
        ("ad",),
    )


def test_items_may_overlap_as_sound_within_a_video_does() -> None:
    inputs = HashInputs(mm=(MmItem("video", 0, 10), MmItem("sound", 2, 2), MmItem("image", 9, 3)))
    assert hashed_extra_keys(inputs, block_size=4, first_block=0, num_blocks=4) == [
        (("mm", "video", 0), ("mm", "sound", 2)),
        (("mm", "video", -4),),
        (("mm", "video", -8), ("mm", "image", 1)),
        None,
    ]


def test_blocks_without_keys() -> None:
    salted = HashInputs(cache_salt="s")
    assert hashed_extra_keys(salted, block_size=4, first_block=0, num_blocks=2) == [
        (("cache_salt", "s"),),
        None,
    ]
    assert event_extra_keys(salted, block_size=4, first_block=0, num_blocks=2) == (("s",), None)
    assert event_extra_keys(salted, block_size=4, first_block=1, num_blocks=2) is None
    assert event_extra_keys(HashInputs(), block_size=4, first_block=0, num_blocks=2) is None


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: LoraAdapter("\ud800", 1, "p"), "lora.name"),
        (lambda: LoraAdapter("n", 1, 5), "lora.path"),
        (lambda: MmItem(b"x", 0, 1), "mm.identifier"),
        (lambda: MmItem("x", -1, 1), "mm.offset"),
        (lambda: MmItem("x", 0, True), "mm.length"),
        (lambda: HashInputs(cache_salt=7), "cache_salt"),
        (lambda: HashInputs(cache_salt="\udcff"), "cache_salt"),
        (lambda: HashInputs(mm=(MmItem("x", 5, 1), MmItem("y", 0, 1))), "mm"),
        (lambda: PromptEmbeds("float16", (3, 2), bytes(13)), "prompt_embeds.data"),
        (lambda: PromptEmbeds("float16", (), b""), "prompt_embeds.shape"),
    ],
)
def test_bad_inputs_are_named(make: object, field: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}:"):
        make()  # type: ignore[operator]
