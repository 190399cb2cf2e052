"""The store as a process: it starts without its Redis, and stops in time."""

import signal
from pathlib import Path

import pytest

from support.service_process import ServiceProcess
from support.valkey_server import free_port


def start(folder: Path, **settings: object) -> ServiceProcess:
    defaults: dict[str, object] = {
        "listen_address": f"127.0.0.1:{free_port()}",
        "blocks_endpoint": f"tcp://127.0.0.1:{free_port()}",
    }
    return ServiceProcess("store", folder, metrics_port=free_port(), **{**defaults, **settings})


def test_it_is_ready_without_redis_and_never_shows_the_password(tmp_path: Path) -> None:
    process = start(tmp_path, redis_url=f"redis://:sesame@127.0.0.1:{free_port()}/0")
    try:
        process.wait_until_ready()
        assert "reprise_store_redis_up 0.0" in process.metrics()
        assert process.terminate() == 0
        assert "sesame" not in process.log_path.read_text()
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("settings", "sentence", "code"),
    [
        ({"redis_url": "http://x"}, "REPRISE_STORE_REDIS_URL", 2),
        (
            {"redis_url": "rediss://h", "redis_tls_ca_file": "/no/such"},
            "REPRISE_STORE_REDIS_TLS_CA_FILE: Value error, /no/such: No such file",
            2,
        ),
        ({"capcity_bytes": "1"}, "REPRISE_STORE_CAPCITY_BYTES: unknown setting", 2),
        ({"blocks_endpoint": "tcp://no-such-device:1234"}, "store: cannot bind tcp://no-such-device:1234", 1),
    ],
)
def test_a_start_that_cannot_be_says_why(
    tmp_path: Path, settings: dict[str, object], sentence: str, code: int
) -> None:
    process = start(tmp_path, **settings)
    try:
        assert process.wait() == code
        assert sentence in process.log_path.read_text()
        assert "Traceback" not in process.log_path.read_text()
    finally:
        process.kill()


def test_signals_other_than_term(tmp_path: Path) -> None:
    process = start(tmp_path)
    try:
        process.wait_until_ready()
        process._process.send_signal(signal.SIGINT)
        assert process.wait(5) == 0
    finally:
        process.kill()
