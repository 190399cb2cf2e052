"""One installation: which processes there are, where each listens, and its settings.

Ports are counted from the base: gateway HTTP on it, the rest of what is shared above it, then a
stretch of 10 per engine. Everything listens on loopback alone, except the gateway where `--host`
says otherwise.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reprise_cli.serve.engine_options import EVENTS_ON
from reprise_core.errors import InvalidInput
from reprise_wire.events_config import endpoint_of_rank

TRACED_SERVICES = frozenset({"gateway", "tokenizer", "scheduler", "store"})
"""Those that a request passes through; a worker's time is in its scheduler's spans."""
SHARED_PORTS = 20
PORTS_PER_ENGINE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    model_path: Path
    model_name: str
    state_dir: Path
    host: str = "127.0.0.1"
    port_base: int = 8000
    engines: int = 1
    redis_command: tuple[str, ...] | None = None
    """Binary of the Redis or Valkey to start; None = the store runs on memory alone."""
    redis_memory: str = "1gb"
    log_level: str = "warning"
    kv_events: Mapping[str, object] = field(default_factory=lambda: dict(EVENTS_ON))
    """The reference's events config, over the endpoints and topic of each engine; empty = no events."""
    trace_dir: Path | None = None
    """Where each traced service writes its spans; None = no tracing."""
    overrides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Service -> setting name -> value, for every process of that service."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ready_url: str | None
    """/readyz, or None for Redis, which is probed by a connection to `address`."""
    metrics_url: str | None
    address: str


@dataclass(frozen=True, slots=True)
class Layout:
    processes: tuple[ProcessSpec, ...]
    endpoints: Mapping[str, object]
    """What the ready file says."""
    ports: tuple[int, ...]


def make_layout(options: ServeOptions) -> Layout:
    return _LayoutBuilder(options).build()


class _LayoutBuilder:
    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._processes: list[ProcessSpec] = []
        self._ports: list[int] = []
        last = options.port_base + SHARED_PORTS + options.engines * PORTS_PER_ENGINE
        if options.port_base < 1 or last > 65535:
            raise InvalidInput("port_base", f"{options.port_base}: ports up to {last} would be used")
        if not 1 <= options.engines <= 64:
            raise InvalidInput("engines", f"{options.engines} is not in 1..64")

    def build(self) -> Layout:
        options = self._options
        engines = [self._engine(index) for index in range(options.engines)]
        tokenizer, store = self._local(2), self._local(3)
        redis = self._redis()
        self._store(store, redis)
        self._tokenizer(tokenizer)
        gateway_http = f"{options.host}:{self._port(0)}"
        self._add(
            "gateway",
            "gateway",
            gateway_http,
            self._local(6),
            listen_address=gateway_http,
            tokenizer_address=tokenizer,
            engines=",".join(str(engine["grpc"]) for engine in engines),
        )
        endpoints = {
            "gateway": f"http://{_reachable(options.host)}:{options.port_base}",
            "redis": redis,
            "tokenizer": tokenizer,
            "store": store,
            "metrics": {spec.name: spec.metrics_url for spec in self._processes if spec.metrics_url},
            "engines": engines,
        }
        if options.trace_dir is not None:
            endpoints["traces"] = str(options.trace_dir)
        return Layout(tuple(self._processes), endpoints, tuple(self._ports))

    def _engine(self, index: int) -> dict[str, object]:
        """Worker first: it takes longest to start."""
        options = self._options
        start = SHARED_PORTS + index * PORTS_PER_ENGINE
        grpc, workers, intake, events, replay, publisher = (self._local(start + i) for i in range(6))
        suffix = f"-{index}" if options.engines > 1 else ""
        engine_id = f"engine-{index}"
        self._add(
            f"worker{suffix}",
            "worker",
            "",
            self._local(start + 7),
            model_path=options.model_path,
            model_name=options.model_name,
            scheduler_endpoint=f"tcp://{workers}",
            store_endpoint=f"tcp://{self._local(4)}",
        )
        self._add(
            f"scheduler{suffix}",
            "scheduler",
            grpc,
            self._local(start + 6),
            engine_id=engine_id,
            engine_index=index,
            listen_address=grpc,
            workers_endpoint=f"tcp://{workers}",
            publisher_endpoint=f"tcp://{intake}" if options.kv_events else "",
            store_address=self._local(3),
            tokenizer_address=self._local(2),
        )
        events_config = self._events_config(index, engine_id, f"tcp://{events}", f"tcp://{replay}")
        self._add(
            f"publisher{suffix}",
            "publisher",
            publisher,
            self._local(start + 8),
            listen_address=publisher,
            intake_endpoint=f"tcp://{intake}",
            events_config=json.dumps(events_config),
            bind="auto" if "bind" in events_config else "bind",
        )
        return {
            "id": engine_id,
            "grpc": grpc,
            "events": _connectable(events_config.get("endpoint")),
            "replay": _connectable(events_config.get("replay_endpoint")),
        }

    def _events_config(self, index: int, engine_id: str, events: str, replay: str) -> dict[str, object]:
        """Endpoints that were asked for are those of rank 0: each further engine's ports are one higher."""
        asked = dict(self._options.kv_events)
        if not asked:
            return {}
        for name in ("endpoint", "replay_endpoint"):
            if isinstance(endpoint := asked.get(name), str):
                asked[name] = endpoint_of_rank(endpoint, index)
        own = {
            "publisher": "zmq",
            "endpoint": events,
            "replay_endpoint": replay,
            "topic": f"kv@{engine_id}@{self._options.model_name}",
        }
        return own | asked

    def _redis(self) -> str:
        options = self._options
        if options.redis_command is None:
            return ""
        address = self._local(5)
        folder = options.state_dir / "redis"
        command = (
            *options.redis_command,
            *("--bind", "127.0.0.1", "--port", str(options.port_base + 5), "--dir", str(folder)),
            *("--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning"),
            *("--logfile", str(folder / "redis.log")),
            *("--maxmemory", options.redis_memory, "--maxmemory-policy", "volatile-lru"),
        )
        self._processes.append(ProcessSpec("redis", command, {}, None, None, address))
        return f"redis://{address}/0"

    def _store(self, address: str, redis: str) -> None:
        self._add(
            "store",
            "store",
            address,
            self._local(8),
            listen_address=address,
            blocks_endpoint=f"tcp://{self._local(4)}",
            redis_url=redis,
            # The model may hold every core for a while; a busy machine is no dead Redis.
            redis_timeout_s=2.0,
        )

    def _tokenizer(self, address: str) -> None:
        self._add(
            "tokenizer",
            "tokenizer",
            address,
            self._local(7),
            listen_address=address,
            model_path=self._options.model_path,
            model_name=self._options.model_name,
        )

    def _add(self, name: str, service: str, address: str, metrics: str, **settings: object) -> None:
        prefix = f"REPRISE_{service.upper()}_"
        values = {key: str(value) for key, value in settings.items()}
        values |= {"metrics_address": metrics, "log_level": self._options.log_level, "log_format": "console"}
        values["grace_period_s"] = "3"
        if self._options.trace_dir is not None and service in TRACED_SERVICES:
            values["trace_exporter"] = f"file:{self._options.trace_dir / name}.jsonl"
        values |= self._options.overrides.get(service, {})
        environment = {prefix + key.upper(): value for key, value in values.items()}
        command = (sys.executable, "-m", f"reprise_{service}")
        base = f"http://{metrics}"
        self._processes.append(
            ProcessSpec(name, command, environment, f"{base}/readyz", f"{base}/metrics", address)
        )

    def _port(self, offset: int) -> int:
        port = self._options.port_base + offset
        if port not in self._ports:
            self._ports.append(port)
        return port

    def _local(self, offset: int) -> str:
        return f"127.0.0.1:{self._port(offset)}"


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "", "::") else host


def _connectable(endpoint: object) -> str:
    """Empty = there is none."""
    return str(endpoint or "").replace("*", "127.0.0.1")
