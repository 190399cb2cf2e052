"""The intake's messages: there and back, and what is refused."""

import msgspec
import pytest

from reprise_core.errors import DataLoss
from reprise_core.kv_events import KvEventBatch
from reprise_wire.event_codec import encode_batch
from reprise_wire.event_intake import (
    INTAKE_VERSION,
    RequestKind,
    SourceHeader,
    SourceKind,
    StateChunk,
    StateRequest,
    VersionMismatch,
    batch_frames,
    hello_frames,
    parse_request,
    parse_source_message,
    request_frames,
    state_frames,
)

BATCH = encode_batch(KvEventBatch(1.0, (), 0))


def test_there_and_back() -> None:
    chunk = StateChunk(3, 1, last=True, num_blocks=8, num_unresolved=2, complete=False)
    for frames, kind, sequence, state, payload in (
        (batch_frames(b"e", 7, BATCH), SourceKind.BATCH, 7, None, BATCH),
        (hello_frames(b"e", 8), SourceKind.HELLO, 8, None, b""),
        (state_frames(b"e", 9, chunk, BATCH), SourceKind.STATE, 9, chunk, BATCH),
    ):
        message = parse_source_message(frames)
        assert message.header == SourceHeader(INTAKE_VERSION, kind, b"e", sequence, state)
        assert message.payload == payload
    for request in (RequestKind.WANT_STATE, RequestKind.STATE_ACK):
        assert parse_request(request_frames(request, b"e", 3, 4)) == StateRequest(
            INTAKE_VERSION, request, b"e", 3, 4
        )


def test_the_bytes_are_those_of_the_page() -> None:
    unpacked = [msgspec.msgpack.decode(frame) for frame in hello_frames(b"e", 8)]
    assert unpacked[0][:4] == [2, "hello", b"e", 8]
    (request,) = request_frames(RequestKind.WANT_STATE, b"e", 3)
    assert msgspec.msgpack.decode(request) == [2, "want_state", b"e", 3, 0]
    plain = msgspec.msgpack.encode([2, "state", b"e", 5, [1, 0, True, 4, 0]])
    state = parse_source_message([plain, BATCH]).header.state
    assert state == StateChunk(1, 0, last=True, num_blocks=4, num_unresolved=0, complete=True)


@pytest.mark.parametrize("version", [1, 3])
def test_another_version_is_told_from_damage(version: int) -> None:
    """Whatever else that version has in its header."""
    frames = [msgspec.msgpack.encode([version, 5.5, {}]), BATCH]
    with pytest.raises(VersionMismatch) as caught:
        parse_source_message(frames)
    assert caught.value.theirs == version
    with pytest.raises(VersionMismatch):
        parse_request(frames[:1])


def test_damage() -> None:
    good, payload = batch_frames(b"e", 0, BATCH)
    chunk = StateChunk(1, 0, last=True, num_blocks=0, num_unresolved=0)
    (hello,) = hello_frames(b"e", 0)
    (state, _) = state_frames(b"e", 0, chunk, BATCH)
    cut_state = msgspec.msgpack.encode(SourceHeader(INTAKE_VERSION, SourceKind.STATE, b"e", 0))
    for frames in (
        [],
        [b""],
        [b"\xc1", payload],
        [msgspec.msgpack.encode("text"), payload],
        [msgspec.msgpack.encode([]), payload],
        [good],
        [good, payload, payload],
        [good, b""],
        [good, b"\x80"],
        [hello, payload],
        [state],
        [cut_state, payload],
        batch_frames(b"e" * 65, 0, BATCH),
        batch_frames(b"e", -1, BATCH),
    ):
        with pytest.raises(DataLoss):
            parse_source_message(frames)
    for frames in ([], [b""], [b"\xc1"], [msgspec.msgpack.encode([2, "nonsense", b"e", 1])], [good, good]):
        with pytest.raises(DataLoss):
            parse_request(frames)
