"""Scheduler <-> publisher: event batches in, and the state of the caches when it is asked for.

The publisher binds a ROUTER, a scheduler connects a DEALER. Frame 0 of each message is a msgpack
array, a `SourceHeader` from the scheduler and a `StateRequest` from the publisher; batches and state
chunks have a second frame, an event batch as it will be published (`event_codec`).

- BATCH: `sequence` is counted up before anything can lose the batch, so a hole shows what was lost.
- HELLO: `sequence` is that of the next batch. Says that the source answers WANT_STATE, is sent once a
  second or so, and shows a lost tail.
- WANT_STATE asks for all blocks that are held, in STATE chunks whose `sequence` is that of the first
  batch they do not contain. Each chunk is acknowledged with STATE_ACK, and a source has few on the way.

A new epoch is a new source: what the one before had is gone. Peers of another version are refused.
"""

from enum import StrEnum
from typing import NamedTuple, TypeVar

import msgspec

from reprise_core.errors import DataLoss

INTAKE_VERSION = 2


class SourceKind(StrEnum):
    BATCH = "batch"
    HELLO = "hello"
    STATE = "state"


class RequestKind(StrEnum):
    WANT_STATE = "want_state"
    STATE_ACK = "state_ack"


class StateChunk(msgspec.Struct, frozen=True, array_like=True):
    """What a STATE header has beside epoch and sequence."""

    state_id: int
    """As in the request that it answers."""
    index: int
    """From 0; chunks come in order."""
    last: bool
    num_blocks: int
    """Of the whole state."""
    num_unresolved: int
    """Blocks whose parent, or whose tokens, the source does not know."""
    complete: bool = True
    """False when the source could not record all it has."""


class SourceHeader(msgspec.Struct, frozen=True, array_like=True):
    version: int
    kind: SourceKind
    epoch: bytes
    """Up to 64 bytes, random for each process."""
    sequence: int
    """From 0 within an epoch."""
    state: StateChunk | None = None


class StateRequest(msgspec.Struct, frozen=True, array_like=True):
    version: int
    kind: RequestKind
    epoch: bytes
    state_id: int
    index: int = 0
    """Of the chunk that is acknowledged."""


class VersionMismatch(DataLoss):
    """A peer speaks another version of this protocol."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"event intake version {theirs}, this side speaks {INTAKE_VERSION}")
        self.theirs = theirs


class SourceMessage(NamedTuple):
    header: SourceHeader
    payload: bytes
    """Empty for HELLO."""


class _AnyVersion(msgspec.Struct, frozen=True, array_like=True):
    version: int


Header = TypeVar("Header", SourceHeader, StateRequest)

MAX_EPOCH_BYTES = 64
_BATCH_HEADS = (0x92, 0x93)
"""A batch is a msgpack array of two (no rank) or three."""
_encode = msgspec.msgpack.Encoder().encode
_version_decoder = msgspec.msgpack.Decoder(_AnyVersion)
_header_decoder = msgspec.msgpack.Decoder(SourceHeader)
_request_decoder = msgspec.msgpack.Decoder(StateRequest)


def batch_frames(epoch: bytes, sequence: int, payload: bytes) -> list[bytes]:
    return [_encode(SourceHeader(INTAKE_VERSION, SourceKind.BATCH, epoch, sequence)), payload]


def hello_frames(epoch: bytes, next_sequence: int) -> list[bytes]:
    return [_encode(SourceHeader(INTAKE_VERSION, SourceKind.HELLO, epoch, next_sequence))]


def state_frames(epoch: bytes, sequence: int, chunk: StateChunk, payload: bytes) -> list[bytes]:
    return [_encode(SourceHeader(INTAKE_VERSION, SourceKind.STATE, epoch, sequence, chunk)), payload]


def request_frames(kind: RequestKind, epoch: bytes, state_id: int, index: int = 0) -> list[bytes]:
    return [_encode(StateRequest(INTAKE_VERSION, kind, epoch, state_id, index))]


def parse_source_message(frames: list[bytes]) -> SourceMessage:
    """Raises VersionMismatch, or DataLoss for what is no message of this protocol."""
    if not frames:
        raise DataLoss("event intake message without frames")
    header = _decode(_header_decoder, frames[0])
    wanted = 1 if header.kind is SourceKind.HELLO else 2
    if len(frames) != wanted:
        raise DataLoss(f"event intake {header.kind} of {len(frames)} frames, must have {wanted}")
    if header.sequence < 0 or len(header.epoch) > MAX_EPOCH_BYTES:
        raise DataLoss(f"event intake sequence {header.sequence}, epoch of {len(header.epoch)} bytes")
    if (header.state is not None) != (header.kind is SourceKind.STATE):
        raise DataLoss(f"event intake {header.kind} with{'' if header.state else 'out'} a chunk's numbers")
    payload = frames[1] if wanted == 2 else b""
    if wanted == 2 and (not payload or payload[0] not in _BATCH_HEADS):
        raise DataLoss("event intake payload is no event batch")
    return SourceMessage(header, payload)


def parse_request(frames: list[bytes]) -> StateRequest:
    """Raises VersionMismatch or DataLoss."""
    if len(frames) != 1:
        raise DataLoss(f"event intake request of {len(frames)} frames, must have 1")
    return _decode(_request_decoder, frames[0])


def _decode(decoder: "msgspec.msgpack.Decoder[Header]", frame: bytes) -> Header:
    try:
        header = decoder.decode(frame)
    except msgspec.DecodeError as error:
        _check_version(_decode_version(frame))
        raise DataLoss(f"event intake header: {error}") from error
    _check_version(header.version)
    return header


def _check_version(version: int) -> None:
    if version != INTAKE_VERSION:
        raise VersionMismatch(version)


def _decode_version(frame: bytes) -> int:
    """Of a header that may be of another version."""
    try:
        return _version_decoder.decode(frame).version
    except msgspec.DecodeError as error:
        raise DataLoss(f"event intake header: {error}") from error
