"""KV events on the wire: batches to msgpack and back, and the frames around them.

A batch is an array [timestamp, events, rank]. An event is a map whose first pair is `type`; the older
form is an array whose first item is the type and whose fields have positions. Both are decoded, also
mixed in one batch; unknown map fields and further array positions are ignored.

Sequence numbers travel as 8 big-endian bytes. A replay answer ends with END_SEQ and an empty payload.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from reprise_core.errors import DataLoss
from reprise_core.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExternalHash,
    KvEvent,
    KvEventBatch,
)

END_SEQ = b"\xff" * 8
_SEQ_NBYTES = 8

Frame = bytes | memoryview


class EventForm(StrEnum):
    MAP = "map"
    """As vLLM 0.33 writes it: the map head of BlockStored always takes 3 bytes."""
    MAP_0_32 = "map-0.32"
    """As vLLM 0.22 to 0.32 wrote it: shortest heads, and no look-ahead tokens."""
    ARRAY = "array"
    """By position; only the first 12 (BlockStored) and 4 (BlockRemoved) fields of the map form."""


class _Stored032(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="BlockStored"):
    block_hashes: tuple[ExternalHash, ...]
    parent_block_hash: ExternalHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class _StoredArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    block_hashes: tuple[ExternalHash, ...]
    parent_block_hash: ExternalHash | None
    token_ids: tuple[int, ...]
    block_size: int
    # The oldest publishers stop here.
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _RemovedArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    block_hashes: tuple[ExternalHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _OpenBatch(msgspec.Struct, array_like=True):
    """A batch whose events are still to be told apart."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_map_decoder = msgspec.msgpack.Decoder(KvEventBatch)
_open_decoder = msgspec.msgpack.Decoder(_OpenBatch)

_MAP_TYPES: dict[str, type[KvEvent]] = {
    event_type.__name__: event_type for event_type in (BlockStored, BlockRemoved, AllBlocksCleared)
}
_ARRAY_TYPES: dict[str, type[msgspec.Struct]] = {
    "BlockStored": _StoredArray,
    "BlockRemoved": _RemovedArray,
    "AllBlocksCleared": _ClearedArray,
}
_UNDECODABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, TypeError)
# The reference always writes these; other engines may not.
_NULL_WHEN_ABSENT = {"lora_id": None, "medium": None, "lora_name": None}


def encode_batch(batch: KvEventBatch, *, form: EventForm = EventForm.MAP) -> bytes:
    if form is EventForm.MAP:
        return _encoder.encode(batch)
    wire_event = _stored_032 if form is EventForm.MAP_0_32 else _array_event
    return _encoder.encode(
        (batch.ts, [wire_event(event) for event in batch.events], batch.data_parallel_rank)
    )


def encode_event(event: KvEvent, *, form: EventForm = EventForm.MAP) -> bytes:
    """One event as it stands within a batch."""
    if form is EventForm.MAP:
        return _encoder.encode(event)
    return _encoder.encode(_stored_032(event) if form is EventForm.MAP_0_32 else _array_event(event))


def with_rank(batch: KvEventBatch, rank: int) -> KvEventBatch:
    """The batch with the publisher's rank where it has none."""
    return batch if batch.data_parallel_rank is not None else KvEventBatch(batch.ts, batch.events, rank)


def decode_batch(payload: Frame, *, on_unknown: Callable[[str], None] | None = None) -> KvEventBatch:
    """The batch of a payload, or DataLoss.

    An event of an unknown type is skipped and its type given to `on_unknown`; without that it is an
    error.
    """
    try:
        batch = _map_decoder.decode(payload)
    except msgspec.ValidationError:
        return _decode_open(payload, on_unknown)
    except _UNDECODABLE as error:
        raise DataLoss(f"event batch: {error}") from error
    if any(map(_has_keys, batch.events)):
        events = tuple(_with_tuple_keys(event) for event in batch.events)
        return KvEventBatch(batch.ts, events, batch.data_parallel_rank)
    return batch


def is_heartbeat(payload: Frame) -> bool:
    """A batch without events."""
    try:
        return not decode_batch(payload, on_unknown=lambda name: None).events
    except DataLoss:
        return False


def _decode_open(payload: Frame, on_unknown: Callable[[str], None] | None) -> KvEventBatch:
    """Event by event, for batches with array events, unknown types or absent fields."""
    try:
        batch = _open_decoder.decode(payload)
        events: list[KvEvent] = []
        for value in batch.events:
            name = _type_name(value)
            if name in _MAP_TYPES:
                events.append(_with_tuple_keys(_known_event(name, value)))
            elif on_unknown is not None:
                on_unknown(name)
            else:
                raise DataLoss(f"event batch: unknown event type {name!r}")
    except _UNDECODABLE as error:
        raise DataLoss(f"event batch: {error}") from error
    return KvEventBatch(batch.ts, tuple(events), batch.data_parallel_rank)


def _type_name(value: object) -> str:
    name: object = None
    if isinstance(value, dict):
        name = value.get("type")
    elif isinstance(value, list) and value:
        name = value[0]
    if not isinstance(name, str):
        raise DataLoss("event batch: an event is neither a map with a type nor an array that begins with one")
    return name


def _known_event(name: str, value: dict[str, Any] | list[Any]) -> KvEvent:
    if isinstance(value, dict):
        return msgspec.convert({**_NULL_WHEN_ABSENT, **value}, _MAP_TYPES[name])
    fields = msgspec.structs.asdict(msgspec.convert(value, _ARRAY_TYPES[name]))
    return _MAP_TYPES[name](**fields)


def _with_tuple_keys(event: KvEvent) -> KvEvent:
    """The event with (identifier, offset) pairs as tuples, as the core makes them."""
    if not _has_keys(event):
        return event
    assert isinstance(event, BlockStored)
    assert event.extra_keys is not None
    extra_keys = tuple(
        None if keys is None else tuple(tuple(key) if isinstance(key, list) else key for key in keys)
        for keys in event.extra_keys
    )
    return msgspec.structs.replace(event, extra_keys=extra_keys)


def _has_keys(event: KvEvent) -> bool:
    return type(event) is BlockStored and event.extra_keys is not None and any(event.extra_keys)


def _stored_032(event: KvEvent) -> msgspec.Struct:
    if type(event) is not BlockStored:
        return event
    return _Stored032(*(getattr(event, name) for name in _Stored032.__struct_fields__))


def _array_event(event: KvEvent) -> msgspec.Struct:
    array_type = _ARRAY_TYPES[type(event).__name__]
    return array_type(*(getattr(event, name) for name in array_type.__struct_fields__))


class PublishedBatch(NamedTuple):
    """One batch as a subscriber or a replay client gets it; the payload is not decoded yet."""

    topic: str
    sequence: int
    payload: bytes


def pub_frames(topic: str, sequence: int, payload: bytes) -> list[bytes]:
    return [topic.encode(), sequence.to_bytes(_SEQ_NBYTES, "big"), payload]


def parse_pub_frames(frames: Sequence[Frame]) -> PublishedBatch:
    """A live message: topic, sequence, payload."""
    if len(frames) != 3:
        raise DataLoss(f"event message of {len(frames)} frames, must have 3")
    return _published(*frames)


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    identity: bytes
    start: int


def parse_replay_request(frames: Sequence[Frame]) -> ReplayRequest | None:
    """A request as a ROUTER sees it: identity, one frame (normally empty), start number.

    The number is big-endian of any length, and empty means 0. Anything else gives None and gets no
    answer.
    """
    if len(frames) != 3:
        return None
    return ReplayRequest(bytes(frames[0]), int.from_bytes(frames[2], "big"))


def replay_request_frames(start: int) -> list[bytes]:
    """What a DEALER sends."""
    return [b"", start.to_bytes(_SEQ_NBYTES, "big")]


def replay_reply_frames(identity: bytes, topic: str | None, sequence: int, payload: bytes) -> list[bytes]:
    """One batch of a replay answer, as the ROUTER sends it; None = without a topic, the older form."""
    number = sequence.to_bytes(_SEQ_NBYTES, "big")
    if topic is None:
        return [identity, b"", number, payload]
    return [identity, b"", topic.encode(), number, payload]


def replay_end_frames(identity: bytes, *, with_topic: bool = True) -> list[bytes]:
    return [identity, b"", b"", END_SEQ, b""] if with_topic else [identity, b"", END_SEQ, b""]


def parse_replay_reply(frames: Sequence[Frame]) -> PublishedBatch | None:
    """One message of a replay answer, as a DEALER gets it; None is the end mark.

    The frames are (empty, topic, sequence, payload), and (empty, sequence, payload) from older
    publishers. A REQ socket takes the empty frame off itself.
    """
    if len(frames) not in (3, 4):
        raise DataLoss(f"replay message of {len(frames)} frames, must have 3 or 4")
    topic, sequence, payload = frames[-3:]
    if bytes(sequence) == END_SEQ and not len(payload):
        return None
    return _published(topic, sequence, payload)


def _published(topic: Frame, sequence: Frame, payload: Frame) -> PublishedBatch:
    if len(sequence) != _SEQ_NBYTES:
        raise DataLoss(f"event sequence number of {len(sequence)} bytes, must have {_SEQ_NBYTES}")
    try:
        text = bytes(topic).decode()
    except UnicodeDecodeError as error:
        raise DataLoss("event topic is not UTF-8") from error
    return PublishedBatch(text, int.from_bytes(sequence, "big"), bytes(payload))
