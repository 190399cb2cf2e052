"""Settings of KV events, under the reference's names and defaults, and the rules of their endpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from reprise_core.errors import InvalidInput

MAX_PORT = 65535


class SocketRole(StrEnum):
    BIND = "bind"
    CONNECT = "connect"


class BindMode(StrEnum):
    """AUTO is the reference's rule, by which a concrete address connects."""

    AUTO = "auto"
    BIND = "bind"
    CONNECT = "connect"


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """The reference's events config, and below the line our own options.

    `publisher` is null (nothing is sent) or zmq; by default zmq when events are enabled.
    """

    enable_kv_cache_events: bool = False
    publisher: str = ""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Batches kept for replay."""
    hwm: int = 100_000
    """High-water mark of the PUB socket, in messages per subscriber."""
    max_queue_size: int = 100_000
    """Batches that may wait for the publisher."""
    topic: str = ""
    # Ours.
    bind: BindMode = field(default=BindMode.AUTO, kw_only=True)

    def __post_init__(self) -> None:
        if not self.publisher:
            object.__setattr__(self, "publisher", "zmq" if self.enable_kv_cache_events else "null")
        if self.publisher not in ("null", "zmq"):
            raise InvalidInput("publisher", f"{self.publisher!r}, must be null or zmq")
        if self.bind not in tuple(BindMode):
            raise InvalidInput("bind", f"{self.bind!r}, must be auto, bind or connect")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise InvalidInput(name, f"{value!r}, must be a whole number of at least 0")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any] | None) -> Self:
        """None and an empty mapping give the defaults; an unknown name is refused."""
        values = values or {}
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise InvalidInput(unknown[0], f"no such events setting, must be one of {sorted(known)}")
        return cls(**values)

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def role(self) -> SocketRole:
        return socket_role(self.endpoint, self.bind)


def socket_role(endpoint: str, mode: BindMode = BindMode.AUTO) -> SocketRole:
    """Whether a PUB socket binds; `0.0.0.0` is a concrete address to the automatic rule."""
    if mode is not BindMode.AUTO:
        return SocketRole(mode.value)
    binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    return SocketRole.BIND if binds else SocketRole.CONNECT


def endpoint_of_rank(endpoint: str | None, rank: int) -> str | None:
    """The endpoint of a data-parallel rank: the rank is added to the port, in both endpoints.

    Port 0 stays 0, inproc gets a suffix, anything without a TCP port is refused for ranks above 0.
    Like the reference's, the rule looks for the letters tcp, and lets a port grow past 65535;
    `check_port_ranges` refuses that.
    """
    if not endpoint or rank == 0:
        return endpoint
    if "inproc" in endpoint:
        return f"{endpoint}_dp{rank}"
    if "tcp" not in endpoint:
        raise InvalidInput("endpoint", f"{endpoint!r}, only tcp and inproc endpoints can serve rank {rank}")
    base, port = _split_port(endpoint)
    return f"{base}:{port + rank}" if port else endpoint


def check_port_ranges(endpoint: str, replay_endpoint: str | None, num_ranks: int) -> None:
    """Refuse ranges of ports that overlap or run past the last port."""
    ranges: list[tuple[str, range]] = []
    for name, value in (("endpoint", endpoint), ("replay_endpoint", replay_endpoint)):
        if not value or not value.startswith("tcp://") or (num_ranks == 1 and value.endswith(":*")):
            continue
        first = _split_port(value)[1]
        if first + num_ranks - 1 > MAX_PORT:
            raise InvalidInput(name, f"port {first} and {num_ranks} ranks run past {MAX_PORT}")
        if first:
            ranges.append((name, range(first, first + num_ranks)))
    if len(ranges) == 2:
        live, replay = ranges[0][1], ranges[1][1]
        if live.start < replay.stop and replay.start < live.stop:
            raise InvalidInput(
                "replay_endpoint",
                f"ports {replay.start} to {replay.stop - 1} overlap the endpoint's, "
                f"{live.start} to {live.stop - 1}",
            )


def _split_port(endpoint: str) -> tuple[str, int]:
    base, colon, port = endpoint.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        raise InvalidInput("endpoint", f"{endpoint!r}, must end with a port number")
    return base, int(port)
