"""KV events as smg's messages."""

from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2 as pb

from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from reprise_publisher.kv_event_proto import Untellable, event_to_proto, signed_hash


def stored(**changes: Any) -> BlockStored:
    fields: dict[str, Any] = {
        "block_hashes": (1, 2**63 + 5),
        "parent_block_hash": 2**64 - 1,
        "token_ids": (10, 11, 12, 13),
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return BlockStored(**{**fields, **changes})


def message(**changes: Any) -> pb.KvBlocksStored:
    return event_to_proto(stored(**changes), event_id=4).stored


@pytest.mark.parametrize(
    ("block_hash", "signed"),
    [
        (0, 0),
        (2**63 - 1, 2**63 - 1),
        (2**63, -(2**63)),
        (2**64 - 1, -1),
        (15760518052499183552, 15760518052499183552 - 2**64),
        (b"\x00" * 24 + b"\xff" * 7 + b"\xfe", -2),
        (b"\x01" * 24 + b"\x00" * 7 + b"\x09", 9),
        (-3, -3),
    ],
)
def test_hashes_are_the_same_64_bits_with_a_sign(block_hash: int | bytes, signed: int) -> None:
    assert signed_hash(block_hash) == signed


def test_a_stored_event_block_by_block() -> None:
    event = event_to_proto(stored(group_idx=0, kv_cache_spec_kind="full_attention"), event_id=4)
    assert event.event_id == 4
    assert event.stored.parent_block_hash == -1
    assert event.stored.group_idx == 0
    assert event.stored.HasField("group_idx")
    assert event.stored.kv_cache_spec_kind == "full_attention"
    assert not event.stored.HasField("kv_cache_spec_sliding_window")
    first, second = event.stored.blocks
    assert (first.block_hash, list(first.token_ids), first.block_size) == (1, [10, 11], 2)
    assert (second.block_hash, list(second.token_ids)) == (5 - 2**63, [12, 13])


def test_a_chains_start_has_no_parent() -> None:
    assert not message(parent_block_hash=None).HasField("parent_block_hash")
    assert message(parent_block_hash=0).HasField("parent_block_hash")


@pytest.mark.parametrize(
    ("medium", "tier", "level"),
    [
        ("GPU", pb.KV_CACHE_TIER_DEVICE, 0),
        (None, pb.KV_CACHE_TIER_DEVICE, 0),
        ("CPU", pb.KV_CACHE_TIER_HOST, 1),
        ("CPU_PINNED", pb.KV_CACHE_TIER_HOST, 1),
        ("STORAGE", pb.KV_CACHE_TIER_DISK, 2),
        ("EXTERNAL", pb.KV_CACHE_TIER_EXTERNAL, 3),
        ("TAPE", pb.KV_CACHE_TIER_EXTERNAL, 3),
    ],
)
def test_media_are_tiers(medium: str | None, tier: int, level: int) -> None:
    told = message(medium=medium)
    assert (told.tier, told.blocks[0].cache_level) == (tier, level)
    assert told.medium == (medium or "")
    assert told.HasField("medium") is (medium is not None)
    removed = event_to_proto(BlockRemoved(block_hashes=(2**64 - 2,), medium=medium), event_id=1).removed
    assert (removed.tier, removed.cache_level, list(removed.block_hashes)) == (tier, level, [-2])


def test_keys_of_a_block_keep_their_kinds() -> None:
    keys = (("adapter", ("image", -3), "salt", b"digest", 7, 1.5), None)
    told = message(extra_keys=keys, parent_block_hash=None, lora_name="adapter", lora_id=2)
    first, second = told.blocks
    kinds = [key.WhichOneof("key") for key in first.extra_keys]
    assert kinds == ["text", "multimodal", "text", "blob", "number", "text"]
    assert first.extra_keys[1].multimodal == pb.KvMultimodalKey(identifier="image", offset=-3)
    assert first.extra_keys[3].blob == b"digest"
    assert not second.extra_keys
    assert (told.lora_name, told.cache_salt, first.lora_id) == ("adapter", "salt", 2)


def test_a_salt_is_named_only_where_its_chain_begins() -> None:
    assert message(extra_keys=(("salt",), None), parent_block_hash=None).cache_salt == "salt"
    assert not message(extra_keys=(("salt",), None)).HasField("cache_salt")
    assert not message(extra_keys=(("adapter",),) * 2, lora_name="adapter").HasField("cache_salt")


def test_locality_ownership_and_session_are_carried() -> None:
    told = message(locality="REMOTE", ownership="agent", session_id="s", kv_cache_spec_sliding_window=8)
    assert told.locality == pb.KV_CACHE_LOCALITY_REMOTE
    assert (told.ownership, told.session_id, told.kv_cache_spec_sliding_window) == ("agent", "s", 8)
    assert not message().HasField("locality")


def test_cleared() -> None:
    assert event_to_proto(AllBlocksCleared(), event_id=0).WhichOneof("data") == "cleared"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"token_ids": ()}, "no_tokens"),
        ({"token_ids": (), "medium": "CPU"}, "no_tokens"),
        ({"token_ids": (1, 2, 3)}, "no_tokens"),
        ({"token_ids": (1, 2, 3, -4)}, "malformed"),
        ({"token_ids": (1, 2, 3, 2**32)}, "malformed"),
        ({"lora_id": 2**70}, "malformed"),
    ],
)
def test_what_cannot_be_told_is_said(changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(Untellable) as raised:
        message(**changes)
    assert raised.value.cause == cause


def test_groups_that_nobody_indexes_need_no_tokens() -> None:
    told = message(token_ids=(1, 2), kv_cache_spec_kind="sliding_window")
    assert [list(block.token_ids) for block in told.blocks] == [[], []]


def test_where_nobody_gets_tokens_none_are_missed() -> None:
    event = event_to_proto(stored(token_ids=()), event_id=1, needs_tokens=False)
    assert [block.block_hash for block in event.stored.blocks] == [1, 5 - 2**63]


def test_a_report_is_not_told_as_a_store() -> None:
    with pytest.raises(Untellable, match="report"):
        message(report=True)
