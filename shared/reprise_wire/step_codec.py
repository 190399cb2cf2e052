"""Scheduler <-> worker messages: ZMQ multipart, a header frame and a body frame.

The scheduler binds a ROUTER, workers connect DEALERs. Frame 0 is a msgpack `Header`, frame 1 the
msgpack body that `kind` names. No pickle ever crosses the socket. A frame that does not parse
raises `MalformedFrame`; the receiver counts it and goes on.

Handshake: the worker says HELLO until it hears WELCOME (which names the session) or REFUSED (which
names both versions, and ends the worker). Every later message of either side carries the session
id; a message of another session is dropped and counted, and a scheduler answers it with STALE, on
which the worker says HELLO again.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec

from reprise_core.errors import DataLoss
from reprise_core.models import ModelInfo, WorkerCapacity
from reprise_core.steps import StepPlan, StepResult, TransferReport

PROTOCOL_VERSION = 3
SESSION_ID_NBYTES = 16

Frame = bytes | memoryview


class Kind(StrEnum):
    HELLO = "hello"  # worker: Hello
    HEARTBEAT = "heartbeat"  # worker: Heartbeat
    RESULT = "result"  # worker: StepResult
    TRANSFER = "transfer"  # worker: TransferReport
    WELCOME = "welcome"  # scheduler: Welcome
    REFUSED = "refused"  # scheduler: Refused
    STALE = "stale"  # scheduler: empty map
    PLAN = "plan"  # scheduler: StepPlan


class Header(msgspec.Struct, frozen=True, array_like=True):
    version: int
    kind: str
    session: bytes
    """16 random bytes, or empty before WELCOME."""
    step_id: int = 0
    """Of the plan or result; 0 for other kinds."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    """Random per worker process."""
    greeting: int = 0
    """How many sessions this process has lost; a HELLO that is only repeated has the same number."""
    rank: int
    world_size: int
    model: ModelInfo
    capacity: WorkerCapacity


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    heartbeat_interval_s: float
    engine_id: str


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    scheduler_version: int
    worker_version: int
    reason: str


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    last_step_id: int
    busy: bool


class Stale(msgspec.Struct, frozen=True):
    """The header's session is over: the one that a message came with, not the scheduler's present one."""


Body = Hello | Heartbeat | StepResult | TransferReport | Welcome | Refused | Stale | StepPlan

_BODY_TYPES: dict[str, type] = {
    Kind.HELLO: Hello,
    Kind.HEARTBEAT: Heartbeat,
    Kind.RESULT: StepResult,
    Kind.TRANSFER: TransferReport,
    Kind.WELCOME: Welcome,
    Kind.REFUSED: Refused,
    Kind.STALE: Stale,
    Kind.PLAN: StepPlan,
}
_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_body_decoders: dict[str, msgspec.msgpack.Decoder[Body]] = {
    kind: msgspec.msgpack.Decoder(body_type) for kind, body_type in _BODY_TYPES.items()
}
T = TypeVar("T")


class MalformedFrame(DataLoss):
    """Frames that are no message of this protocol."""


class VersionMismatch(DataLoss):
    def __init__(self, theirs: int) -> None:
        super().__init__(f"peer speaks protocol version {theirs}, this side {PROTOCOL_VERSION}")
        self.theirs = theirs


def encode(kind: Kind, body: Body, *, session: bytes, step_id: int = 0) -> list[bytes]:
    header = Header(PROTOCOL_VERSION, kind, session, step_id)
    return [_encoder.encode(header), _encoder.encode(body)]


def decode_header(frames: Sequence[Frame]) -> Header:
    """Raises MalformedFrame; the version is for the caller to judge (`check_version`)."""
    if len(frames) != 2:
        raise MalformedFrame(f"expected 2 frames, got {len(frames)}")
    try:
        return _header_decoder.decode(frames[0])
    except msgspec.DecodeError as error:
        raise MalformedFrame(f"header: {error}") from error


def check_version(header: Header) -> None:
    if header.version != PROTOCOL_VERSION:
        raise VersionMismatch(header.version)


def decode_body(header: Header, frames: Sequence[Frame], body_type: type[T]) -> T:
    """The body of a message whose kind the caller has dispatched on."""
    expected = _BODY_TYPES.get(header.kind)
    if expected is not body_type:
        raise MalformedFrame(f"kind {header.kind!r} carries no {body_type.__name__}")
    try:
        body = _body_decoders[header.kind].decode(frames[1])
    except msgspec.DecodeError as error:
        raise MalformedFrame(f"{header.kind} body: {error}") from error
    assert isinstance(body, body_type)
    return body
