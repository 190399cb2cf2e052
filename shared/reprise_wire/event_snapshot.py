"""A snapshot of what a source holds, over the publisher's replay socket.

A DEALER sends [empty, b"snapshot", request]; a publisher that knows no snapshots drops a message of
that many frames without an answer. It gets messages [empty, b"snapshot", meta, payload], the payload
an event batch as in the live stream: the first begins with AllBlocksCleared, stores follow, parents
before children, one event per copy and medium. Live batches after `sequence` go on from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from reprise_core.errors import DataLoss, Unavailable

SNAPSHOT_VERSION = 1
SNAPSHOT_MARK = b"snapshot"
_REQUEST_FRAMES = 4
_ANSWER_FRAMES = 4


class SnapshotMeta(msgspec.Struct, frozen=True):
    """The map beside each chunk."""

    topic: str
    rank: int
    index: int
    """From 0; chunks come in order."""
    last: bool
    sequence: int
    """Every published batch up to this one is contained."""
    num_blocks: int
    """Of the whole snapshot."""
    num_unresolved: int
    """Of its blocks, those whose parent, or whose tokens, the source does not know."""
    complete: bool
    """False when the publisher knows that it does not know all."""
    unresolved: tuple[int, ...] = ()
    """Places of the events in this payload that are not resolved."""
    version: int = SNAPSHOT_VERSION


class _Refusal(msgspec.Struct, frozen=True):
    error: str
    version: int = SNAPSHOT_VERSION


class _AnyMeta(msgspec.Struct, frozen=True):
    version: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    identity: bytes
    version: int


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    meta: SnapshotMeta
    payload: bytes


class SnapshotRefused(Unavailable):
    """The publisher's reason: busy, or it speaks another version."""


_encode = msgspec.msgpack.Encoder().encode
_any_decoder = msgspec.msgpack.Decoder(_AnyMeta)
_meta_decoder = msgspec.msgpack.Decoder(SnapshotMeta)


def snapshot_request_frames() -> list[bytes]:
    """What a DEALER sends."""
    return [b"", SNAPSHOT_MARK, _encode({"version": SNAPSHOT_VERSION})]


def parse_snapshot_request(frames: Sequence[bytes]) -> SnapshotRequest | None:
    """A request as a ROUTER sees it; None for anything else."""
    if len(frames) != _REQUEST_FRAMES or frames[2] != SNAPSHOT_MARK:
        return None
    try:
        return SnapshotRequest(frames[0], _any_decoder.decode(frames[3]).version)
    except msgspec.DecodeError:
        return None


def snapshot_chunk_frames(identity: bytes, chunk: SnapshotChunk) -> list[bytes]:
    """As the ROUTER sends it."""
    return [identity, b"", SNAPSHOT_MARK, _encode(chunk.meta), chunk.payload]


def snapshot_refusal_frames(identity: bytes, error: str) -> list[bytes]:
    """As the ROUTER sends it: one message, and no more."""
    return [identity, b"", SNAPSHOT_MARK, _encode(_Refusal(error)), b""]


def is_snapshot_answer(frames: Sequence[bytes]) -> bool:
    """Whether a DEALER got part of a snapshot; anything else on this socket belongs to a replay."""
    return len(frames) == _ANSWER_FRAMES and frames[1] == SNAPSHOT_MARK


def parse_snapshot_answer(frames: Sequence[bytes]) -> SnapshotChunk:
    """Raises SnapshotRefused with the publisher's reason, or DataLoss."""
    if not is_snapshot_answer(frames):
        raise DataLoss(f"snapshot answer of {len(frames)} frames, must have {_ANSWER_FRAMES}")
    try:
        head = _any_decoder.decode(frames[2])
        if head.error:
            raise SnapshotRefused(f"the publisher refuses a snapshot: {head.error}")
        if head.version != SNAPSHOT_VERSION:
            raise DataLoss(f"snapshot version {head.version}, this side speaks {SNAPSHOT_VERSION}")
        return SnapshotChunk(_meta_decoder.decode(frames[2]), frames[3])
    except msgspec.DecodeError as error:
        raise DataLoss(f"snapshot meta: {error}") from error
