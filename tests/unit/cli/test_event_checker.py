"""`reprise events check`: a consistent stream passes, and each fault is named with where it was first."""

import random
from collections.abc import Sequence

import msgspec
import pytest

from reprise_cli.event_check import hash_check
from reprise_cli.event_checker import StreamChecker
from reprise_core.errors import InvalidInput
from reprise_core.extra_keys import HashInputs
from reprise_core.hash_algorithms import HashAlgorithm, external_hash
from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from reprise_wire.event_source_values import Delivery, DeliveryKind, Notice
from support.cache_workload import SEED_TEXT, CacheWorkload

ALGORITHM = HashAlgorithm.XXHASH_CBOR.value


def checked(
    batches: Sequence[Sequence[KvEvent]], *, is_whole: bool = True, with_hashes: bool = True
) -> StreamChecker:
    hashes = hash_check(ALGORITHM, seed=SEED_TEXT, root="") if with_hashes else None
    checker = StreamChecker(hashes)
    for sequence, events in enumerate(batches):
        batch = KvEventBatch(1.0, tuple(events), 0)
        checker.take(Delivery("s", DeliveryKind.LIVE, sequence, "t", batch, 1), is_whole=is_whole)
    return checker


@pytest.fixture
def batches() -> list[list[KvEvent]]:
    workload = CacheWorkload(random.Random(5), num_blocks=200, host_blocks=100)
    return [workload.step() for _ in range(60)] + [workload.reset()] + [workload.step() for _ in range(10)]


def first_store(batches: list[list[KvEvent]], *, child: bool = False) -> tuple[int, int, BlockStored]:
    for sequence, events in enumerate(batches):
        for place, event in enumerate(events):
            if (
                isinstance(event, BlockStored)
                and event.medium == "GPU"
                and child == (event.parent_block_hash is not None)
            ):
                return sequence, place, event
    raise AssertionError("no such event")


def problems(checker: StreamChecker) -> dict[str, int]:
    return {kind: problem.first[0].sequence for kind, problem in checker.problems.items()}


def test_what_our_cache_manager_says_is_consistent(batches: list[list[KvEvent]]) -> None:
    checker = checked(batches)
    assert checker.is_consistent, checker.problems
    assert checker.num_hashes_checked > 500
    assert checker.num_not_judged == 0


def test_a_wrong_hash_is_named(batches: list[list[KvEvent]]) -> None:
    sequence, place, event = first_store(batches)
    tokens = (event.token_ids[0] + 1, *event.token_ids[1:])
    batches[sequence][place] = msgspec.structs.replace(event, token_ids=tokens)
    checker = checked(batches)
    assert problems(checker)["wrong hash"] == sequence
    assert f"{event.block_hashes[0]:016x}" in checker.problems["wrong hash"].first[0].detail
    assert checked(batches, with_hashes=False).is_consistent


def test_a_lost_store_shows_as_unknown_parents_and_removals(batches: list[list[KvEvent]]) -> None:
    sequence, place, _ = first_store(batches)
    del batches[sequence][place]
    assert {"unknown parent", "unknown removal"} <= set(problems(checked(batches)))
    partial = checked(batches, is_whole=False, with_hashes=False)
    assert partial.num_not_judged > 0


def test_what_came_before_we_listened_is_not_judged(batches: list[list[KvEvent]]) -> None:
    checker = checked(batches[30:], is_whole=False)
    assert checker.is_consistent, checker.problems
    assert checker.num_not_judged > 0


def test_an_event_that_is_not_dense_is_named(batches: list[list[KvEvent]]) -> None:
    sequence, place, event = first_store(batches)
    batches[sequence][place] = msgspec.structs.replace(event, token_ids=event.token_ids[:-1])
    assert problems(checked(batches))["not dense"] == sequence


def test_a_removal_too_many_is_named(batches: list[list[KvEvent]]) -> None:
    batches.append([AllBlocksCleared(), BlockRemoved(block_hashes=(1,), medium="GPU")])
    assert problems(checked(batches)) == {"unknown removal": len(batches) - 1}


def test_gaps_and_undecodable_batches_are_problems_of_the_stream() -> None:
    checker = checked([])
    checker.note(Notice("s", "gap", "3 batches are missing", {"first": 4, "last": 6}))
    checker.note(Notice("s", "malformed", "event batch: ...", {"sequence": 9}))
    checker.note(Notice("s", "restart", "the publisher began anew", {}))
    assert problems(checker) == {"sequence gap": 6, "undecodable": 9}


def test_salted_blocks_are_checked_and_adapters_are_not() -> None:
    workload = CacheWorkload(random.Random(5))
    checker = checked([[salted_event(workload, "pepper")]])
    assert checker.is_consistent, checker.problems
    assert checker.num_hashes_checked == 3
    assert problems(checked([[salted_event(workload, "salt", told="pepper")]])) == {"wrong hash": 0}
    adapter = msgspec.structs.replace(salted_event(workload, "pepper"), lora_name="adapter")
    assert checked([[adapter]]).num_not_judged == 3


def salted_event(workload: CacheWorkload, salt: str, *, told: str = "") -> BlockStored:
    chain = workload.hasher.chain(HashInputs(cache_salt=salt))
    chain.append(list(range(48)))
    return BlockStored(
        block_hashes=tuple(map(external_hash, chain.hashes)),
        parent_block_hash=None,
        token_ids=tuple(range(48)),
        block_size=16,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=((told or salt,), None, None),
        group_idx=0,
    )


def test_the_options_of_the_hash_check_are_named() -> None:
    assert hash_check("", seed=None, root="") is None
    with pytest.raises(InvalidInput, match="--seed: needs --algorithm"):
        hash_check("", seed="0", root="")
    with pytest.raises(InvalidInput, match="--algorithm: 'md5', must be one of sha256"):
        hash_check("md5", seed=None, root="")
    with pytest.raises(InvalidInput, match="--seed: xxhash has a random seed"):
        hash_check("xxhash", seed=None, root="")
    with pytest.raises(InvalidInput, match="--none-hash: 'ab', must be 32 bytes"):
        hash_check("sha256", seed=None, root="ab")
    assert hash_check("sha256", seed=None, root="00" * 32) is not None
