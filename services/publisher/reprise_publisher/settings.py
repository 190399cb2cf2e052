"""The settings of the publisher service, read from REPRISE_PUBLISHER_* once at start."""

import json
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from reprise_core.errors import InvalidInput
from reprise_runtime.settings import ServiceSettings, settings_config
from reprise_wire.events_config import BindMode, EventsConfig, check_port_ranges, endpoint_of_rank

MIB = 1024 * 1024


class PublisherSettings(ServiceSettings):
    model_config = settings_config("publisher")
    service: ClassVar[str] = "publisher"

    metrics_address: str = "127.0.0.1:9206"
    listen_address: str = "127.0.0.1:50054"
    """gRPC: status."""
    intake_endpoint: str = "tcp://127.0.0.1:5761"
    """ZMQ PULL for event batches; the scheduler connects."""
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
