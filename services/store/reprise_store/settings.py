"""The settings of the store service, read from REPRISE_STORE_* once at start."""

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from reprise_runtime import tracing
from reprise_runtime.settings import settings_config
from reprise_store.redis_address import RedisKind, parse_redis_url

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
MAX_PORT = 65535
_TLS_FILES = ("redis_tls_ca_file", "redis_tls_cert_file", "redis_tls_key_file")
_FILES = ("redis_password_file", "redis_sentinel_password_file", *_TLS_FILES)


class StoreSettings(tracing.TracedSettings):
    model_config = settings_config("store")
    service: ClassVar[str] = "store"

    metrics_address: str = "127.0.0.1:9205"
    listen_address: str = "127.0.0.1:50053"
    """gRPC: look-up, reset, stats."""
    blocks_endpoint: str = "tcp://127.0.0.1:5770"
    """ZMQ ROUTER for block bytes; workers connect."""

    shared_memory: str = Field(default="auto", pattern=r"^(auto|off|/.{1,100})$")
    """How workers of this machine get block bytes: auto, off (as messages, like those of other machines),
    or the path of a Unix socket, where they run in containers and share a folder with the store."""
    lease_timeout_s: float = Field(default=30.0, gt=0)
    """How long a worker may take to copy what it was given in shared memory."""

    redis_url: str = ""
    """redis://, unix://, redis-sentinel:// or redis-cluster:// (see redis_address); empty means host memory
    alone."""
    redis_password_file: str = ""
    """Holds the password, read for each connection; instead of one in the URL. The user is the URL's."""
    redis_tls_ca_file: str = ""
    """Who signs the servers' certificates; empty = the system's authorities."""
    redis_tls_cert_file: str = ""
    """Our own certificate, for servers that ask for one, and its key."""
    redis_tls_key_file: str = ""
    redis_sentinel_user: str = ""
    """At the sentinels; what the URL says is for the servers."""
    redis_sentinel_password_file: str = ""
    redis_timeout_s: float = Field(default=0.5, gt=0)
    """Limit on one round trip to Redis, waiting for a connection included."""
    redis_connections: int = Field(default=8, ge=2)
    redis_chunk_bytes: int = Field(default=4 * MIB + 64 * KIB, ge=1)
    """Block bytes in one pipeline, so that nobody's command waits long behind ours."""
    redis_chunk_keys: int = Field(default=512, ge=1)
    """Keys in one pipeline."""
    block_ttl_s: float = Field(default=7 * 86400.0, ge=0)
    """Life of a block in Redis after its last save or load; 0 leaves eviction to Redis."""
    codec: Literal["none", "lz4", "zstd"] = "none"
    """How values are compressed in Redis. Every store reads all of them."""

    capacity_bytes: int = Field(default=2 * GIB, ge=0)
    """Block bytes in the host tier; 0 switches it off."""

    disk_folder: str = ""
    """Where the disk tier keeps its blocks, one store per folder; empty = no disk tier."""
    disk_capacity_bytes: int = Field(default=16 * GIB, ge=1)
    disk_queue_bytes: int = Field(default=256 * MIB, ge=1)
    """Block bytes that wait to be written to disk; more are dropped and counted."""

    save_queue_bytes: int = Field(default=256 * MIB, ge=0)
    """Block bytes that wait for Redis or are being written; more are dropped and counted."""
    save_queue_blocks: int = Field(default=4096, ge=0)
    save_queue_age_s: float = Field(default=60.0, gt=0)
    """How long a block may wait for Redis, while that is away for example; then it is dropped and counted."""
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

    tier_changes_blocks: int = Field(default=1_000_000, ge=1)
    """Blocks followed per model and tier for those who watch; the oldest are told as removed."""
    tier_watch_queue_blocks: int = Field(default=65_536, ge=1)
    """Changes that wait for one watcher; past it everything is sent anew."""

    breaker_failures: int = Field(default=3, ge=1)
    """Failed calls in a row after which Redis is left alone."""
    breaker_cooldown_s: float = Field(default=1.0, gt=0)
    """How long it is left alone before one probe."""

    @field_validator("redis_url")
    @classmethod
    def _known_address(cls, url: str) -> str:
        if url:
            parse_redis_url(url)
        return url

    @field_validator(*_FILES)
    @classmethod
    def _readable(cls, path: str) -> str:
        if path:
            try:
                Path(path).open("rb").close()
            except OSError as error:
                raise ValueError(f"{path}: {error.strerror}; must be a file that can be read") from None
        return path

    @field_validator(*_FILES, "redis_sentinel_user")
    @classmethod
    def _goes_with_the_url(cls, value: str, info: ValidationInfo) -> str:
        """`redis_url` stands before these fields, so it was checked already."""
        url, name = info.data.get("redis_url"), info.field_name
        if not value or url is None:
            return value
        address = parse_redis_url(url) if url else None
        if name in _TLS_FILES and not (address and address.tls):
            raise ValueError("needs a redis_url with TLS (rediss://, rediss-cluster://, ...)")
        if name == "redis_password_file" and (address is None or address.password):
            raise ValueError("needs a redis_url, and none with a password in it")
        if "sentinel" in str(name) and not (address and address.kind is RedisKind.SENTINEL):
            raise ValueError("needs a redis_url of redis-sentinel://")
        return value

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        if bool(self.redis_tls_cert_file) != bool(self.redis_tls_key_file):
            raise ValueError("redis_tls_cert_file and redis_tls_key_file: set both, or none")
        return self

    @field_validator("blocks_endpoint")
    @classmethod
    def _port_exists(cls, endpoint: str) -> str:
        port = endpoint.rpartition(":")[2]
        if endpoint.startswith("tcp://") and port != "*" and not (port.isdigit() and int(port) <= MAX_PORT):
            raise ValueError(f"{endpoint!r} must end with a port of at most {MAX_PORT}")
        return endpoint
