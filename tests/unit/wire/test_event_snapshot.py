"""Snapshots on the wire: there and back, and what is refused."""

import msgspec
import pytest

from reprise_core.errors import DataLoss
from reprise_wire.event_codec import parse_replay_request
from reprise_wire.event_snapshot import (
    SnapshotChunk,
    SnapshotMeta,
    SnapshotRefused,
    SnapshotRequest,
    is_snapshot_answer,
    parse_snapshot_answer,
    parse_snapshot_request,
    snapshot_chunk_frames,
    snapshot_refusal_frames,
    snapshot_request_frames,
)

META = SnapshotMeta(
    topic="t",
    rank=1,
    index=0,
    last=True,
    sequence=9,
    num_blocks=4,
    num_unresolved=1,
    complete=False,
    unresolved=(2,),
)


def test_there_and_back() -> None:
    frames = [b"id", *snapshot_request_frames()]
    assert frames[2:] == [b"snapshot", msgspec.msgpack.encode({"version": 1})]
    assert parse_snapshot_request(frames) == SnapshotRequest(b"id", 1)
    # A publisher that knows no snapshots drops it, and this one a replay.
    assert parse_replay_request(frames) is None
    assert parse_snapshot_request([b"id", b"", b"\0" * 8]) is None
    chunk = SnapshotChunk(META, b"batch")
    identity, *answer = snapshot_chunk_frames(b"id", chunk)
    assert identity == b"id"
    assert is_snapshot_answer(answer)
    assert parse_snapshot_answer(answer) == chunk


def test_a_refusal_is_the_publisher_s_reason() -> None:
    _, *answer = snapshot_refusal_frames(b"id", "busy")
    with pytest.raises(SnapshotRefused, match="busy"):
        parse_snapshot_answer(answer)


def test_what_is_none_of_this() -> None:
    _, *good = snapshot_chunk_frames(b"id", SnapshotChunk(META, b"batch"))
    later = msgspec.msgpack.encode({**msgspec.to_builtins(META), "version": 2})
    for frames in (
        [],
        good[:3],
        [b"", b"other", *good[2:]],
        [*good[:2], b"\xc1", b""],
        [*good[:2], later, b""],
    ):
        with pytest.raises(DataLoss):
            parse_snapshot_answer(frames)
    for frames in ([b"id", b"", b"snapshot", b"\xc1"], [b"id", b"", b"other", good[2]], [b"id"]):
        assert parse_snapshot_request(frames) is None


def test_fields_that_a_later_publisher_adds_are_passed_over() -> None:
    more = msgspec.msgpack.encode({**msgspec.to_builtins(META), "new": 5})
    assert parse_snapshot_answer([b"", b"snapshot", more, b"b"]).meta == META
