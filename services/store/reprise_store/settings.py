"""The settings of the store service, read from REPRISE_STORE_* once at start."""

from typing import ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from reprise_runtime import tracing
from reprise_runtime.settings import settings_config

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
MAX_PORT = 65535
REDIS_SCHEMES = ("redis", "rediss", "unix", "valkey", "valkeys", "valkey+unix")


class StoreSettings(tracing.TracedSettings):
    model_config = settings_config("store")
    service: ClassVar[str] = "store"

    metrics_address: str = "127.0.0.1:9205"
    listen_address: str = "127.0.0.1:50053"
    """gRPC: look-up, reset, stats."""
    blocks_endpoint: str = "tcp://127.0.0.1:5770"
    """ZMQ ROUTER for block bytes; workers connect."""

    redis_url: str = ""
    """redis://, rediss:// or unix:// (valkey spellings too); empty means host memory alone."""
    redis_timeout_s: float = Field(default=0.5, gt=0)
    """Limit on one round trip to Redis, waiting for a connection included."""
    redis_connections: int = Field(default=8, ge=2)
    redis_chunk_bytes: int = Field(default=4 * MIB, ge=1)
    """Block bytes in one pipeline, so that nobody's command waits long behind ours."""
    redis_chunk_keys: int = Field(default=512, ge=1)
    """Keys in one EXISTS pipeline."""
    block_ttl_s: float = Field(default=0.0, ge=0)
    """Life of a block in Redis after its last save or load; 0 leaves eviction to Redis."""

    capacity_bytes: int = Field(default=2 * GIB, ge=0)
    """Block bytes in the host tier; 0 switches it off."""

    save_queue_bytes: int = Field(default=256 * MIB, ge=0)
    """Block bytes that wait to be written to Redis; more are dropped and counted."""
    save_queue_blocks: int = Field(default=4096, ge=0)
    save_writers: int = Field(default=2, ge=1)
    """Pipelines that write to Redis at the same time; fewer than redis_connections, so reads never starve."""
    drain_timeout_s: float = Field(default=3.0, ge=0)
    """How long a stopping store goes on writing what is queued."""

    load_concurrency: int = Field(default=8, ge=1)
    """Loads worked on at the same time."""
    load_queue_requests: int = Field(default=256, ge=1)
    """Loads that wait for their turn; more are refused as unavailable."""
    max_transfer_blocks: int = Field(default=1024, ge=1)
    """Blocks in one SAVE or LOAD message."""
    max_value_bytes: int = Field(default=64 * MIB, ge=1)
    """Bytes of one block value; ZMQ closes the connection of a peer that sends more."""
    max_lookup_blocks: int = Field(default=65536, ge=1)

    breaker_failures: int = Field(default=3, ge=1)
    """Failed calls in a row after which Redis is left alone."""
    breaker_cooldown_s: float = Field(default=1.0, gt=0)
    """How long it is left alone before one probe."""

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        if not url:
            return url
        parts = urlsplit(url)
        if parts.scheme not in REDIS_SCHEMES:
            raise ValueError(
                f"must be empty or start with one of {', '.join(s + '://' for s in REDIS_SCHEMES)}"
            )
        try:
            _ = parts.port
        except ValueError:
            raise ValueError("must have a port number, or none, after the host") from None
        return url

    @field_validator("blocks_endpoint")
    @classmethod
    def _port_exists(cls, endpoint: str) -> str:
        port = endpoint.rpartition(":")[2]
        if endpoint.startswith("tcp://") and port != "*" and not (port.isdigit() and int(port) <= MAX_PORT):
            raise ValueError(f"{endpoint!r} must end with a port of at most {MAX_PORT}")
        return endpoint
