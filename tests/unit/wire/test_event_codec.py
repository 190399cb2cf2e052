"""Event batches in every form, from our own encoder and from others'."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise_core.errors import DataLoss
from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from reprise_wire.event_codec import (
    END_SEQ,
    EventForm,
    PublishedBatch,
    decode_batch,
    encode_batch,
    parse_pub_frames,
    parse_replay_reply,
    parse_replay_request,
    pub_frames,
    replay_end_frames,
    replay_reply_frames,
    replay_request_frames,
    with_rank,
)

HASH = 15760518052499183552  # above 2**63, as captured from a live engine


def stored(**changes: object) -> BlockStored:
    fields: dict[str, object] = {
        "block_hashes": (HASH, 2),
        "parent_block_hash": b"\x01" * 32,
        "token_ids": (1, 2, 3, 4),
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "ad",
        "extra_keys": (("ad", ("image", -3), b"\x02" * 32), None),
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 128,
    }
    return BlockStored(**{**fields, **changes})  # type: ignore[arg-type]


REMOVED = BlockRemoved(block_hashes=(HASH,), medium="GPU", group_idx=1)
EVENTS: tuple[KvEvent, ...] = (stored(), REMOVED, AllBlocksCleared())


@pytest.mark.parametrize("form", list(EventForm))
def test_round_trip(form: EventForm) -> None:
    batch = KvEventBatch(1.5, EVENTS, 3)
    assert decode_batch(encode_batch(batch, form=form)) == batch


@pytest.mark.parametrize("form", [EventForm.MAP, EventForm.MAP_0_32])
def test_round_trip_of_the_newer_fields(form: EventForm) -> None:
    event = stored(locality="REMOTE", ownership="redis", session_id="conv-1")
    assert decode_batch(encode_batch(KvEventBatch(1.0, (event,)), form=form)).events == (event,)


def test_look_ahead_tokens_exist_in_the_newest_form_only() -> None:
    event = stored(lookahead_token_ids=((5, 6), (7, 8)))
    assert decode_batch(encode_batch(KvEventBatch(1.0, (event,)))).events == (event,)
    older = decode_batch(encode_batch(KvEventBatch(1.0, (event,)), form=EventForm.MAP_0_32))
    assert older.events == (stored(),)


def test_array_form_has_the_fields_at_their_places() -> None:
    payload = encode_batch(KvEventBatch(1.5, EVENTS), form=EventForm.ARRAY)
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [
            [
                "BlockStored",
                [HASH, 2],
                b"\x01" * 32,
                [1, 2, 3, 4],
                2,
                None,
                "GPU",
                "ad",
                [["ad", ["image", -3], b"\x02" * 32], None],
                1,
                "sliding_window",
                128,
            ],
            ["BlockRemoved", [HASH], "GPU", 1],
            ["AllBlocksCleared"],
        ],
        None,
    ]


def test_arrays_and_maps_in_one_batch_and_what_we_do_not_know() -> None:
    """kthena#1535: a decoder that knew arrays only left its index empty."""
    payload = msgspec.msgpack.encode(
        [
            2.0,
            [
                {"type": "BlockRemoved", "block_hashes": [1], "medium": None, "a_new_field": {"x": [1]}},
                ["BlockRemoved", [2], "GPU", 0, "a new position"],
                ["BlockStored", [3], None, [1, 2], 2],
                {
                    "type": "BlockStored",
                    "block_hashes": [4],
                    "parent_block_hash": 3,
                    "token_ids": [],
                    "block_size": 2,
                },
            ],
        ]
    )
    assert decode_batch(payload) == KvEventBatch(
        2.0,
        (
            BlockRemoved(block_hashes=(1,), medium=None),
            BlockRemoved(block_hashes=(2,), medium="GPU", group_idx=0),
            *(
                BlockStored(
                    block_hashes=(block_hash,),
                    parent_block_hash=parent,
                    token_ids=token_ids,
                    block_size=2,
                    lora_id=None,
                    medium=None,
                    lora_name=None,
                )
                for block_hash, parent, token_ids in ((3, None, (1, 2)), (4, 3, ()))
            ),
        ),
    )


def test_an_unknown_event_type_is_skipped_and_told() -> None:
    payload = msgspec.msgpack.encode(
        [2.0, [{"type": "BlockMoved", "x": 1}, ["Other"], {"type": "AllBlocksCleared"}], 0]
    )
    unknown: list[str] = []
    assert decode_batch(payload, on_unknown=unknown.append).events == (AllBlocksCleared(),)
    assert unknown == ["BlockMoved", "Other"]
    with pytest.raises(DataLoss, match="BlockMoved"):
        decode_batch(payload)


MALFORMED = [
    b"",
    b"\xc1",
    b"\x93",
    msgspec.msgpack.encode({}),
    msgspec.msgpack.encode([1.0]),
    msgspec.msgpack.encode(["now", [], 0]),
    msgspec.msgpack.encode([1.0, [7], 0]),
    msgspec.msgpack.encode([1.0, [[]], 0]),
    msgspec.msgpack.encode([1.0, [{"type": 5}], 0]),
    msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}], 0]),
    msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": ["x"], "medium": None}], 0]),
    msgspec.msgpack.encode([1.0, [["BlockStored", [1]]], 0]),
    b"\x93\xcb" + bytes(8) + b"\x91" * 10_000,
    b"\x93\xcb" + bytes(8) + b"\x91\x82\xa4type\xa1\xff\xa1\xffx",
    b"\x93\xcb" + bytes(8) + b"\x91\x81\x90\x01\xc0",
]


@pytest.mark.parametrize("payload", MALFORMED)
def test_malformed_payloads_are_data_loss(payload: bytes) -> None:
    with pytest.raises(DataLoss):
        decode_batch(payload)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_payloads_are_decoded_or_refused_and_nothing_else(data: st.DataObject) -> None:
    payload = bytearray(
        encode_batch(KvEventBatch(1.5, EVENTS, 3), form=data.draw(st.sampled_from(list(EventForm))))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    del payload[data.draw(st.integers(1, len(payload))) :]
    with suppress(DataLoss):
        decode_batch(bytes(payload))


def test_the_rank_is_filled_in_only_where_it_is_missing() -> None:
    assert with_rank(KvEventBatch(1.0, ()), 2).data_parallel_rank == 2
    assert with_rank(KvEventBatch(1.0, (), 0), 2).data_parallel_rank == 0


@pytest.mark.parametrize("topic", ["", "kv@engine-1@möbius"])
def test_live_frames(topic: str) -> None:
    """ROCm/ATOM#2203: three frames also when the topic is empty."""
    frames = pub_frames(topic, 258, b"payload")
    assert frames == [topic.encode(), b"\0\0\0\0\0\0\1\2", b"payload"]
    assert parse_pub_frames(frames) == PublishedBatch(topic, 258, b"payload")


@pytest.mark.parametrize(
    "frames", [[], [b"x"], [b"", bytes(8)], [b"", bytes(7), b"x"], [b"\xff", bytes(8), b""], [b""] * 4]
)
def test_malformed_live_frames_are_data_loss(frames: list[bytes]) -> None:
    with pytest.raises(DataLoss):
        parse_pub_frames(frames)


def test_replay_frames() -> None:
    request = parse_replay_request([b"id", *replay_request_frames(7)])
    assert request is not None
    assert (request.identity, request.start) == (b"id", 7)
    reply = replay_reply_frames(b"id", "topic", 7, b"payload")
    assert parse_replay_reply(reply[1:]) == PublishedBatch("topic", 7, b"payload")
    assert parse_replay_reply(replay_end_frames(b"id")[1:]) is None


def test_replay_answers_of_older_publishers_lack_the_topic() -> None:
    assert parse_replay_reply([b"", bytes(7) + b"\x05", b"payload"]) == PublishedBatch("", 5, b"payload")
    assert parse_replay_reply([b"", END_SEQ, b""]) is None


@pytest.mark.parametrize("frames", [[], [b"id"], [b"id", b""], [b"id", b"", b"1", b"2"]])
def test_other_requests_get_no_answer(frames: list[bytes]) -> None:
    assert parse_replay_request(frames) is None


@pytest.mark.parametrize("frames", [[], [b""], [b"", END_SEQ], [b"", b"t", b"short", b""], [b""] * 5])
def test_malformed_replay_answers_are_data_loss(frames: list[bytes]) -> None:
    with pytest.raises(DataLoss):
        parse_replay_reply(frames)
