"""Scheduler -> publisher: event batches over ZMQ, two frames.

The publisher binds a PULL, the scheduler connects a PUSH. Frame 0 is a msgpack `IntakeHeader`,
frame 1 the batch as it will be published (`event_codec`). The scheduler counts `sequence` up
before its bounded queue, so a batch that was dropped on the way leaves a gap that the publisher
carries on. A new epoch means a restarted scheduler: the publisher announces cleared first.
"""

import msgspec

from reprise_core.errors import DataLoss

INTAKE_VERSION = 1


class IntakeHeader(msgspec.Struct, frozen=True, array_like=True):
    version: int
    epoch: bytes
    """16 random bytes per scheduler process."""
    sequence: int
    """From 0 within an epoch."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(IntakeHeader)


def encode_intake(header: IntakeHeader) -> bytes:
    return _encoder.encode(header)


def decode_intake(frame: bytes | memoryview) -> IntakeHeader:
    try:
        header = _decoder.decode(frame)
    except msgspec.DecodeError as error:
        raise DataLoss(f"event intake header: {error}") from error
    if header.version != INTAKE_VERSION:
        raise DataLoss(f"event intake version {header.version}, this side {INTAKE_VERSION}")
    return header
