"""The settings of the publisher service, read from REPRISE_PUBLISHER_* once at start."""

import json
from typing import ClassVar, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from reprise_core.errors import InvalidInput
from reprise_runtime.settings import ServiceSettings, settings_config
from reprise_wire.event_codec import EventForm
from reprise_wire.events_config import BindMode, EventsConfig, check_port_ranges, endpoint_of_rank

MIB = 1024 * 1024


class PublisherSettings(ServiceSettings):
    model_config = settings_config("publisher")
    service: ClassVar[str] = "publisher"

    metrics_address: str = "127.0.0.1:9206"
    listen_address: str = "127.0.0.1:50054"
    """gRPC: status, and the event stream as smg reads it."""
    intake_endpoint: str = "tcp://127.0.0.1:5761"
    """ZMQ ROUTER for event batches and the source's state; the scheduler connects."""
    events_config: str = "{}"
    """JSON object with the reference's settings: enable_kv_cache_events, publisher, endpoint,
    replay_endpoint, buffer_steps, hwm, max_queue_size, topic. Off unless enable_kv_cache_events is true."""
    data_parallel_rank: int = Field(default=0, ge=0)
    """Added to the ports of both endpoints."""
    data_parallel_size: int = Field(default=1, ge=1)
    """How many ranks there are, to refuse port ranges that overlap."""
    bind: BindMode = BindMode.AUTO
    """bind or connect for the events endpoint; auto is the reference's rule: * and :: bind, a concrete
    address connects."""
    heartbeat_s: float = Field(default=5.0, ge=0)
    """An empty batch after this much silence, so that a lost tail shows; 0 = none."""
    buffer_bytes: int = Field(default=512 * MIB, ge=1)
    """Limit on the replay buffer beside buffer_steps; the oldest batches go first."""
    max_batch_bytes: int = Field(default=64 * MIB, ge=1)
    """Bytes of one batch; ZMQ closes the connection of a peer that sends more."""
    replay_readers: int = Field(default=64, ge=1)
    """Replays answered at the same time; further requests are dropped and counted."""
    replay_stall_s: float = Field(default=30.0, gt=0)
    """A reader that takes nothing for this long is given up."""
    replay_topic: bool = True
    """False: answers of a replay have no topic frame, as the reference sent them before 0.26."""
    snapshot_readers: int = Field(default=4, ge=1)
    """Snapshots read at the same time, each with a copy of the record; further requests are refused."""
    record_blocks: int = Field(default=2_000_000, ge=1)
    """Blocks that the record of the stream holds; beyond it snapshots are not complete."""
    record_backlog_bytes: int = Field(default=64 * MIB, ge=1)
    """Published batches that wait to be recorded in a burst; beyond it recording comes before publishing."""
    state_timeout_s: float = Field(default=2.0, gt=0)
    """How long a source that is asked for its state, and each part of it, is waited for."""
    hold_bytes: int = Field(default=64 * MIB, ge=1)
    """Live batches held while a state comes in; beyond it they are dropped and it is asked for again."""
    event_token_ids: bool = True
    """False: stored events leave without token ids, for subscribers that need only hashes."""
    event_salts: Literal["clear", "digest"] = "clear"
    """digest: events carry a keyed digest in the place of a cache salt."""
    event_salt_secret: SecretStr = SecretStr("")
    """Key of those digests; empty = a random one per process."""
    event_form: EventForm = EventForm.MAP
    """How events are written: map, map-0.32 (without look-ahead tokens) or array."""
    curve_secret_key_file: str = ""
    """Secret key (Z85) of the events and replay sockets; empty = they are plain."""
    curve_allowed_keys_file: str = ""
    """File or folder of client keys that may connect, or any. Needed with a secret key."""
    allow_plain_grpc: bool = False
    """Offer the gRPC event stream, which is not encrypted, also where CURVE is on."""
    rpc_readers: int = Field(default=16, ge=1)
    """Readers of the gRPC event stream at the same time; more are refused."""
    rpc_queue_batches: int = Field(default=4096, ge=1)
    """Batches that wait for one of them; beyond it, and beyond rpc_queue_bytes, it gets a snapshot."""
    rpc_queue_bytes: int = Field(default=32 * MIB, ge=1)
    rpc_stall_s: float = Field(default=30.0, gt=0)
    """A reader of the gRPC stream that takes nothing for this long is ended."""

    @field_validator("events_config")
    @classmethod
    def _valid_events_config(cls, text: str) -> str:
        _parse_events_config(text)
        return text

    @model_validator(mode="after")
    def _valid_endpoints(self) -> Self:
        num_ranks = max(self.data_parallel_size, self.data_parallel_rank + 1)
        try:
            check_port_ranges(self.events.endpoint, self.events.replay_endpoint, num_ranks)
            _ = self.events_endpoint, self.replay_endpoint
        except InvalidInput as error:
            raise ValueError(f"events_config: {error}") from error
        return self

    @property
    def events(self) -> EventsConfig:
        return _parse_events_config(self.events_config)

    @property
    def bind_mode(self) -> BindMode:
        return self.bind if self.bind is not BindMode.AUTO else BindMode(self.events.bind)

    @property
    def events_endpoint(self) -> str:
        return endpoint_of_rank(self.events.endpoint, self.data_parallel_rank) or ""

    @property
    def replay_endpoint(self) -> str:
        """Empty = no replay."""
        return endpoint_of_rank(self.events.replay_endpoint, self.data_parallel_rank) or ""


def _parse_events_config(text: str) -> EventsConfig:
    try:
        values = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"must be a JSON object: {error}") from error
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"must be a JSON object, not {type(values).__name__}")
    try:
        return EventsConfig.from_mapping(values)
    except InvalidInput as error:
        raise ValueError(str(error)) from error
    except TypeError as error:
        raise ValueError(f"wrong type of a value: {error}") from error
