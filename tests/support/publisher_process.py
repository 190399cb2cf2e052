"""A publisher process on ports that it keeps from one start to the next."""

import json
import os
import signal
from pathlib import Path

from support.service_process import ServiceProcess
from support.valkey_server import free_port


class PublisherPorts:
    def __init__(self, folder: Path, **settings: object) -> None:
        self._folder = folder
        self._settings = settings
        intake, events, replay, self._metrics_port, self._grpc_port = (free_port() for _ in range(5))
        self.intake_endpoint = f"tcp://127.0.0.1:{intake}"
        self.events_endpoint = f"tcp://127.0.0.1:{events}"
        self.replay_endpoint = f"tcp://127.0.0.1:{replay}"
        self.process: ServiceProcess | None = None

    def start(self) -> ServiceProcess:
        """Returns when it is ready."""
        config = {
            "enable_kv_cache_events": True,
            "endpoint": self.events_endpoint,
            "replay_endpoint": self.replay_endpoint,
            "topic": "kv@e@m",
        }
        self.process = ServiceProcess(
            "publisher",
            self._folder,
            metrics_port=self._metrics_port,
            listen_address=f"127.0.0.1:{self._grpc_port}",
            intake_endpoint=self.intake_endpoint,
            events_config=json.dumps(config),
            bind="bind",
            **{"heartbeat_s": 0.2, **self._settings},
        )
        self.process.wait_until_ready()
        return self.process

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def pause(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)
