"""`reprise bench hashing`, `hashing-limit`, `hashing-append`.

The peer of whole prompts is the reference, or else a straightforward loop: each block's tuple is
serialised with pickle or cbor2 and digested, as the reference does. The limit
is digesting bytes that are serialised already. Token ids are drawn uniformly from a large vocabulary,
seeded. Seconds are of processor time, since hashing never waits.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import process_time

from reprise_cli.bench.reference import Reference, find_reference
from reprise_cli.bench.report import DEFAULT_REPEATS, BenchRow, interleaved_medians
from reprise_core.hash_algorithms import HashAlgorithm, bytes_digester, serialize, value_digester
from reprise_core.hash_chain import BlockHasher
from reprise_core.ids import BlockHash
from reprise_core.native_encoding import Encoding, available_encodings
from reprise_core.none_hash import none_hash

BLOCK_SIZE = 16
PROMPT_TOKENS = (1024, 16_384, 131_072)
# Each measured call hashes this many tokens, as one prompt or as several.
TOKENS_PER_CALL = 131_072
APPENDED_TOKENS = 32_768
VOCABULARY = 128_256
UNIT = "tokens/s"
PLAIN_LOOP = "plain loop"
LIMIT = "digest of serialised bytes"
# The reference's recorded range is 574k to 602k (sha256_cbor, block size 16, another machine).
REFERENCE_APPEND = "reference, recorded"
REFERENCE_APPEND_TOKENS_PER_S = 602_000.0


def hashing_rows(*, repeats: int = DEFAULT_REPEATS) -> list[BenchRow]:
    """Whole prompts in pure Python, and with the accelerator where it is built, against the peer: the
    reference where `make peers` has installed it, else the plain loop.

    To be reached: 2 for the CBOR forms and 1.2 for the pickle forms in pure Python, 6 with the
    accelerator. Neither side checks token ids, which are right by construction.
    """
    reference = find_reference()
    try:
        return [
            row
            for algorithm in HashAlgorithm
            for num_tokens in PROMPT_TOKENS
            for row in _prompt_rows(algorithm, num_tokens, repeats, reference)
        ]
    finally:
        if reference is not None:
            reference.close()


def _prompt_rows(
    algorithm: HashAlgorithm, num_tokens: int, repeats: int, reference: Reference | None
) -> Iterator[BenchRow]:
    prompt = _token_ids(num_tokens)
    functions: dict[str, Callable[[], object]] = {PLAIN_LOOP: partial(_plain_loop, algorithm, prompt)}
    for label, hasher in _hashers(algorithm).items():
        functions[label] = partial(_hash_prompt, hasher, prompt)
    peer, measured = PLAIN_LOOP, dict[str, Callable[[], float]]()
    if reference is not None:
        peer = f"vLLM {reference.version}"
        measured[peer] = partial(_reference_seconds, reference, algorithm, prompt)
    rates = _rates(functions, num_tokens, repeats, measured)
    peer_value = rates.pop(peer)
    case = f"{algorithm} prompt {num_tokens}"
    for label, rate in rates.items():
        suffix = " plain loop" if label == PLAIN_LOOP else label
        yield BenchRow.higher_is_better(case + suffix, rate, UNIT, peer, peer_value)


def _reference_seconds(reference: Reference, algorithm: HashAlgorithm, prompt: list[int]) -> float:
    """For the prompt as often as `_rates` has ours hashed; the digests are compared."""
    answer = reference.ask(
        "hash",
        algorithm=algorithm.value,
        none_hash=_first_parent(algorithm).hex(),
        num_tokens=len(prompt),
        vocabulary=VOCABULARY,
        times=TOKENS_PER_CALL // len(prompt),
    )
    assert answer["last"] == _hash_prompt(_hasher(algorithm, Encoding.PYTHON), prompt)[-1].hex()
    seconds: float = answer["seconds"]
    return seconds


def hashing_limit_rows(*, repeats: int = DEFAULT_REPEATS) -> list[BenchRow]:
    """The same prompts as a share of what digesting alone allows."""
    rows: list[BenchRow] = []
    for algorithm in HashAlgorithm:
        for num_tokens in PROMPT_TOKENS:
            prompt = _token_ids(num_tokens)
            messages = _messages(algorithm, prompt)
            functions: dict[str, Callable[[], object]] = {LIMIT: partial(_digest_all, algorithm, messages)}
            for label, hasher in _hashers(algorithm).items():
                functions[label] = partial(_hash_prompt, hasher, prompt)
            rates = _rates(functions, num_tokens, repeats)
            limit = rates.pop(LIMIT)
            for label, rate in rates.items():
                case = f"{algorithm} prompt {num_tokens}{label}"
                rows.append(BenchRow.higher_is_better(case, rate, UNIT, LIMIT, limit))
    return rows


def hashing_append_rows(*, repeats: int = DEFAULT_REPEATS) -> list[BenchRow]:
    """One token at a time, after a short and after a long prompt: the cost must not grow."""
    rows: list[BenchRow] = []
    tokens = [(token,) for token in _token_ids(APPENDED_TOKENS)]
    for algorithm in HashAlgorithm:
        for prompt_tokens in (0, 131_072):
            prompt = _token_ids(prompt_tokens)
            functions: dict[str, Callable[[], object]] = {}
            for label, hasher in _hashers(algorithm).items():
                chain = hasher.chain()
                chain.append(prompt)
                functions[label] = partial(_append_each, chain.append, tokens)
            for label, seconds in interleaved_medians(functions, repeats=repeats, clock=process_time).items():
                case = f"{algorithm} append after {prompt_tokens}{label}"
                rate = len(tokens) / seconds
                rows.append(
                    BenchRow.higher_is_better(
                        case, rate, UNIT, REFERENCE_APPEND, REFERENCE_APPEND_TOKENS_PER_S
                    )
                )
    return rows


def _hash_prompt(hasher: BlockHasher, prompt: list[int]) -> list[BlockHash]:
    return hasher.chain().append(prompt, trusted=True)


def _append_each(append: Callable[[tuple[int]], object], tokens: list[tuple[int]]) -> None:
    for token in tokens:
        append(token)


def _plain_loop(algorithm: HashAlgorithm, prompt: list[int]) -> list[BlockHash]:
    digest, parent = value_digester(algorithm), _first_parent(algorithm)
    hashes: list[BlockHash] = []
    for start in range(0, len(prompt) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = _block_hash(digest, parent, prompt[start : start + BLOCK_SIZE])
        hashes.append(parent)
    return hashes


def _block_hash(digest: Callable[[object], BlockHash], parent: BlockHash, token_ids: list[int]) -> BlockHash:
    return digest((parent, tuple(token_ids), None))


def _messages(algorithm: HashAlgorithm, prompt: list[int]) -> list[bytes]:
    chain = [_first_parent(algorithm), *_hasher(algorithm, Encoding.PYTHON).chain().append(prompt)]
    return [
        serialize(algorithm, (chain[index], tuple(prompt[start : start + BLOCK_SIZE]), None))
        for index, start in enumerate(range(0, len(prompt), BLOCK_SIZE))
    ]


def _digest_all(algorithm: HashAlgorithm, messages: list[bytes]) -> None:
    digest = bytes_digester(algorithm)
    for message in messages:
        digest(message)


def _rates(
    functions: Mapping[str, Callable[[], object]],
    num_tokens: int,
    repeats: int,
    measured: Mapping[str, Callable[[], float]] | None = None,
) -> dict[str, float]:
    """Tokens per second of functions that each hash one prompt."""
    times = TOKENS_PER_CALL // num_tokens
    repeated = {name: partial(_call, function, times) for name, function in functions.items()}
    medians = interleaved_medians(repeated, repeats=repeats, clock=process_time, measured=measured)
    return {name: times * num_tokens / seconds for name, seconds in medians.items()}


def _call(function: Callable[[], object], times: int) -> None:
    for _ in range(times):
        function()


def _hashers(algorithm: HashAlgorithm) -> dict[str, BlockHasher]:
    """Suffix of the case name to hasher: pure Python, and the accelerator where it is built."""
    hashers = {"": _hasher(algorithm, Encoding.PYTHON)}
    if Encoding.NATIVE in available_encodings(algorithm):
        hashers[" accelerated"] = _hasher(algorithm, Encoding.NATIVE)
    return hashers


def _hasher(algorithm: HashAlgorithm, encoding: Encoding) -> BlockHasher:
    return BlockHasher(
        algorithm=algorithm,
        block_size=BLOCK_SIZE,
        none_hash=_first_parent(algorithm),
        encoding=encoding,
    )


def _first_parent(algorithm: HashAlgorithm) -> BlockHash:
    return none_hash(algorithm, "bench")


def _token_ids(count: int) -> list[int]:
    return random.Random(count).choices(range(VOCABULARY), k=count)
