"""/metrics, /healthz (alive) and /readyz (can do its work) over plain HTTP, in a thread of its own."""

import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from reprise_runtime.addresses import split_address


class Readiness:
    """Named conditions; a service is ready when none is unmet. Thread-safe."""

    def __init__(self, *conditions: str) -> None:
        self._lock = threading.Lock()
        self._unmet: dict[str, str] = dict.fromkeys(conditions, "starting")
        self._stopping = False

    def met(self, condition: str) -> None:
        with self._lock:
            self._unmet.pop(condition, None)

    def unmet(self, condition: str, why: str) -> None:
        with self._lock:
            self._unmet[condition] = why

    def waiting_for(self) -> dict[str, str]:
        with self._lock:
            return dict(self._unmet)

    @property
    def ready(self) -> bool:
        return not self.waiting_for()


class HealthServer:
    """Serves one service's health and metrics until `stop`."""

    def __init__(
        self,
        address: str,
        *,
        registry: CollectorRegistry,
        readiness: Readiness,
        before_scrape: Callable[[], None] = lambda: None,
    ) -> None:
        handler = _make_handler(registry, readiness, before_scrape)
        self._server = ThreadingHTTPServer(split_address(address), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _make_handler(
    registry: CollectorRegistry, readiness: Readiness, before_scrape: Callable[[], None]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                before_scrape()
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            elif path == "/healthz":
                self._answer(200, "application/json", b'{"status":"ok"}')
            elif path == "/readyz":
                waiting = readiness.waiting_for()
                body = json.dumps({"ready": not waiting, "waiting_for": waiting}).encode()
                self._answer(503 if waiting else 200, "application/json", body)
            else:
                self._answer(404, "application/json", b'{"error":"not found"}')

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            with contextlib.suppress(ConnectionError):  # an impatient probe has hung up
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet: probes come every few seconds."""

    return Handler
