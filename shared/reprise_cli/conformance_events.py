"""Checks one recorded line about KV events against our codec, stream and settings."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from reprise_cli.conformance_publisher import ConformancePublisher
from reprise_cli.conformance_runner import Outcome, Row, first_difference
from reprise_core.errors import InvalidInput
from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from reprise_publisher.stream import PublisherClosed
from reprise_wire.event_codec import (
    EventForm,
    decode_batch,
    encode_batch,
    encode_event,
    parse_replay_request,
)
from reprise_wire.events_config import EventsConfig, endpoint_of_rank, socket_role

Pairs = Iterator[tuple[str, object, object]]

_EVENT_TYPES: dict[str, type[KvEvent]] = {
    event_type.__name__: event_type for event_type in (BlockStored, BlockRemoved, AllBlocksCleared)
}
_IDENTITY = b"client"


def check_event_row(row: Row) -> Outcome:
    return first_difference(row["kind"], _CHECKS[row["kind"]](row))


def _event(row: Row) -> Pairs:
    event = _event_from_fields(row["fields"])
    payload = encode_event(event, form=_form(row))
    yield "wire", row["wire"], _json(msgspec.msgpack.decode(payload))
    yield "msgpack", row["msgpack"], payload.hex()
    batch = KvEventBatch(0.0, (event,))
    decoded = decode_batch(encode_batch(batch, form=_form(row))).events[0]
    yield "fields", row["fields"], _event_fields(decoded, row["fields"])
    recorded = msgspec.msgpack.encode((0.0, [msgspec.Raw(bytes.fromhex(row["msgpack"]))]))
    yield "fields decoded", row["fields"], _event_fields(decode_batch(recorded).events[0], row["fields"])


def _batch(row: Row) -> Pairs:
    payload = encode_batch(_batch_from_fields(row["fields"]), form=_form(row))
    yield "wire", row["wire"], _json(msgspec.msgpack.decode(payload))
    yield "msgpack", row["msgpack"], payload.hex()
    decoded = decode_batch(bytes.fromhex(row["msgpack"]))
    yield "typed_decode", row["typed_decode"], _batch_fields(decoded, row["typed_decode"])


def _pub_frames(row: Row) -> Pairs:
    rank = row["data_parallel_rank"]
    stream = ConformancePublisher(
        topic=row["topic"],
        rank=rank,
        buffer_steps=row.get("buffer_steps", 1),
        form=_form(row),
        first_sequence=row.get("first_sequence", 0),
    )
    given = row.get("batches_as_given")
    batches = [_batch_from_fields(fields) for fields in row["batches"]]
    to_publish = batches if given is None else [decode_batch(bytes.fromhex(text)) for text in given]
    yield "number of messages", len(row["messages"]), len(to_publish)
    for index, message in enumerate(row["messages"]):
        frames = [frame.hex() for frame in stream.publish(to_publish[index])]
        yield f"messages[{index}]", message, frames
        fields = row["batches"][index]
        yield f"batches[{index}]", fields, _batch_fields(decode_batch(bytes.fromhex(message[2])), fields)
    for name in ("resolved_port_offset", "resolved_replay_port_offset"):
        if name in row:
            yield name, row[name], _port_offset_of(row["endpoint_template"], rank)


def _replay(row: Row) -> Pairs:
    replies = row["reply_messages"]
    stream = _replayable_stream(row, {reply[2]: reply[3] for reply in replies})
    request = parse_replay_request([_IDENTITY, *map(bytes.fromhex, row["request_frames"])])
    got = (
        []
        if request is None
        else [[frame.hex() for frame in frames[1:]] for frames in stream.replay(request)]
    )
    yield "number of reply messages", len(replies), len(got)
    for index, (expected, frames) in enumerate(zip(replies, got, strict=True)):
        yield f"reply_messages[{index}]", expected, frames


def _replay_req(row: Row) -> Pairs:
    """A REQ adds and takes off the empty frame itself, and reads one message per request."""
    replies = [row["first_reply"], row["second_reply"]]
    stream = _replayable_stream(row, {reply[1]: reply[2] for reply in replies})
    for name in ("first", "second"):
        request = parse_replay_request([_IDENTITY, b"", bytes.fromhex(row[f"{name}_request"])])
        assert request is not None
        first = stream.replay(request)[0]
        yield f"{name}_reply", row[f"{name}_reply"], [frame.hex() for frame in first[2:]]


def _replayable_stream(row: Row, payload_of: dict[str, str]) -> ConformancePublisher:
    """A stream that published as many batches as the recorded one.

    Payloads come from the replies, checked against our codec; for a number that none of them shows
    any payload will do, and will show up should it be sent.
    """
    stream = ConformancePublisher(
        topic=row["topic"],
        rank=row["data_parallel_rank"],
        buffer_steps=row["buffer_steps"],
        form=_form(row),
    )
    for sequence in range(row["published"]):
        text = payload_of.get(sequence.to_bytes(8, "big").hex())
        if text is None:
            stream.publish(KvEventBatch(0.0, ()))
        else:
            stream.publish(decode_batch(bytes.fromhex(text)))
    return stream


def _publish_after_shutdown(row: Row) -> Pairs:
    stream = ConformancePublisher(topic="", rank=0, buffer_steps=1)
    stream.close()
    raised = None
    try:
        stream.publish(KvEventBatch(0.0, ()))
    except PublisherClosed as error:
        raised = "RuntimeError" if isinstance(error, RuntimeError) else type(error).__name__
    yield "raises", row["raises"], raised


def _port_offset(row: Row) -> Pairs:
    result, error = None, None
    try:
        result = endpoint_of_rank(row["endpoint"], row["rank"])
    except InvalidInput:
        error = "ValueError"
    yield f"error for {row['endpoint']!r}, rank {row['rank']}", row["error"], error
    yield f"result for {row['endpoint']!r}, rank {row['rank']}", row["result"], result


def _bind_or_connect(row: Row) -> Pairs:
    yield f"role of {row['endpoint']!r}", row["role"], socket_role(row["endpoint"]).value


def _config_defaults(row: Row) -> Pairs:
    config = EventsConfig()
    for name, expected in row["fields"].items():
        yield f"fields.{name}", expected, getattr(config, name, "<no such field>")
    enabled = EventsConfig(enable_kv_cache_events=True).publisher
    yield "publisher_when_enabled", row["publisher_when_enabled"], enabled


def _factory(row: Row) -> Pairs:
    config = EventsConfig.from_mapping(row["config"])
    got = "ZmqEventPublisher" if config.publishes else "NullEventPublisher"
    yield "publisher_class", row["publisher_class"], got


_CHECKS: dict[str, Callable[[Row], Pairs]] = {
    "event": _event,
    "batch": _batch,
    "pub_frames": _pub_frames,
    "replay": _replay,
    "replay_req": _replay_req,
    "publish_after_shutdown": _publish_after_shutdown,
    "port_offset": _port_offset,
    "bind_or_connect": _bind_or_connect,
    "config_defaults": _config_defaults,
    "factory": _factory,
}

EVENT_KINDS = tuple(_CHECKS)


def _form(row: Row) -> EventForm:
    """0.33 writes another map head than the releases before it."""
    major, minor = (int(part) for part in row.get("vllm", "0.33.0").split(".")[:2])
    return EventForm.MAP if (major, minor) >= (0, 33) else EventForm.MAP_0_32


def _port_offset_of(template: str, rank: int) -> int:
    base_port = 20_000
    endpoint = endpoint_of_rank(template.replace(":P", f":{base_port}"), rank)
    assert endpoint is not None
    return int(endpoint.rpartition(":")[2]) - base_port


def _event_from_fields(fields: dict[str, Any]) -> KvEvent:
    values = {name: _tuples(value) for name, value in fields.items() if name != "type"}
    return _EVENT_TYPES[fields["type"]](**values)


def _batch_from_fields(fields: dict[str, Any]) -> KvEventBatch:
    events = tuple(_event_from_fields(event) for event in fields["events"])
    return KvEventBatch(fields["ts"], events, fields["data_parallel_rank"])


def _event_fields(event: KvEvent, recorded: dict[str, Any]) -> dict[str, object]:
    """Every attribute in the recorded order; those that a release does not have must be None here."""
    values: dict[str, object] = {"type": type(event).__name__}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name in recorded or value is not None:
            values[name] = _json(value)
    return {name: values[name] for name in recorded if name in values} | values


def _batch_fields(batch: KvEventBatch, recorded: dict[str, Any]) -> dict[str, object]:
    return {
        "ts": batch.ts,
        "events": [
            _event_fields(event, fields)
            for event, fields in zip(batch.events, recorded["events"], strict=True)
        ],
        "data_parallel_rank": batch.data_parallel_rank,
    }


def _tuples(value: Any) -> Any:
    """A recorded value as the core holds it: tuples for lists, bytes for {"bytes": hex}."""
    if isinstance(value, dict):
        return bytes.fromhex(value["bytes"])
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value


def _json(value: object) -> object:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, dict):
        return {name: _json(item) for name, item in value.items()}
    return value
