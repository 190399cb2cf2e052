"""Settings of the gateway service, from REPRISE_GATEWAY_*."""

from typing import ClassVar

from pydantic import Field, field_validator

from reprise_core.errors import InvalidInput
from reprise_runtime import tracing
from reprise_runtime.addresses import split_address
from reprise_runtime.settings import settings_config

KIB = 1024
MIB = 1024 * KIB


class GatewaySettings(tracing.TracedSettings):
    model_config = settings_config("gateway")
    service: ClassVar[str] = "gateway"

    listen_address: str = "127.0.0.1:8000"
    """HTTP."""
    metrics_address: str = "127.0.0.1:9201"
    tokenizer_address: str = "127.0.0.1:50051"
    engines: str = "127.0.0.1:50052"
    """gRPC addresses of the engines' schedulers, separated by commas."""
    dev_mode: bool = False
    """Serves /reset_prefix_cache and /pins."""
    trust_tenant_header: bool = False
    """Takes the tenant from X-Tenant-Id: only where a proxy in front sets it, and callers cannot."""

    max_inflight_requests: int = Field(default=1024, ge=1)
    """HTTP requests worked on at the same time; one more gets a 429."""
    max_inflight_sequences: int = Field(default=2048, ge=1)
    """Sequences generated at the same time (prompts times n); more get a 429. Keep it below the
    tokenizer's max_stream_requests."""
    max_choices: int = Field(default=128, ge=1)
    """Prompts times n in one request."""
    max_body_bytes: int = Field(default=16 * MIB, ge=1)
    """Size of a request body; a larger one gets a 413."""
    max_stop_strings: int = Field(default=64, ge=0)
    max_stop_characters: int = Field(default=1024, ge=1)
    """Length of one stop string."""

    stream_grace_s: float = Field(default=5.0, ge=0)
    """How long a broken engine stream may take to be attached again before its requests go elsewhere."""
    failover_wait_s: float = Field(default=30.0, ge=0)
    """How long a request waits for an engine, or for the tokenizer, that is away."""
    max_resubmissions: int = Field(default=8, ge=0)
    """How often one request is given to an engine again after an engine lost it."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    """Limit on attaching a stream."""
    info_interval_s: float = Field(default=1.0, gt=0)
    """How often an attached engine is asked whether it can serve."""
    retry_interval_s: float = Field(default=0.2, gt=0)
    """Pause between attempts to reach a peer that is away."""
    tokenize_timeout_s: float = Field(default=30.0, gt=0)
    reset_timeout_s: float = Field(default=15.0, gt=0)
    metrics_timeout_s: float = Field(default=2.0, gt=0)
    """An engine that does not give its metrics in this time is left out of /metrics."""

    @field_validator("engines")
    @classmethod
    def _addresses(cls, value: str) -> str:
        addresses = [address.strip() for address in value.split(",") if address.strip()]
        if not addresses:
            raise ValueError("must name at least one engine as HOST:PORT")
        if len(set(addresses)) != len(addresses):
            raise ValueError("names an engine twice")
        for address in addresses:
            try:
                split_address(address)
            except InvalidInput as error:
                raise ValueError(error.problem) from error
        return ",".join(addresses)

    @property
    def engine_addresses(self) -> tuple[str, ...]:
        return tuple(self.engines.split(","))
