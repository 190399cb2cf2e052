"""Settings that would fail later fail at start."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from reprise_store.settings import StoreSettings


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis://localhost",
        "redis://:pw@127.0.0.1:6379/0",
        "rediss://user:pw@host:6380/1",
        "unix:///run/redis.sock",
        "valkey://h:1",
        "valkeys://h:1",
        "valkey+unix:///run/v.sock",
    ],
)
def test_urls(url: str) -> None:
    assert StoreSettings(redis_url=url).redis_url == url


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"redis_url": "http://x"}, "redis_url"),
        ({"redis_url": "127.0.0.1:6379"}, "redis_url"),
        ({"redis_url": "redis://h:port"}, "redis_url"),
        ({"redis_timeout_s": 0}, "redis_timeout_s"),
        ({"capacity_bytes": -1}, "capacity_bytes"),
        ({"blocks_endpoint": "tcp://127.0.0.1:70000"}, "blocks_endpoint"),
        ({"breaker_failures": 0}, "breaker_failures"),
        ({"redis_url": "redis-sentinel://h"}, "redis_url"),
        ({"codec": "gzip"}, "codec"),
    ],
)
def test_what_is_wrong_is_named_and_passwords_are_not_shown(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        StoreSettings(**settings)


@pytest.fixture
def secret(tmp_path: Path) -> str:
    (tmp_path / "secret").write_text("sesame")
    return str(tmp_path / "secret")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"redis_password_file": "/no/such"}, "redis_password_file.*\\n.*/no/such: No such file"),
        ({"redis_tls_ca_file": "/no/such"}, "redis_tls_ca_file.*\\n.*/no/such: No such file"),
        ({"redis_url": "", "redis_password_file": "SECRET"}, "redis_password_file.*\\n.*needs a redis_url"),
        (
            {"redis_url": "redis://:p@h", "redis_password_file": "SECRET"},
            "redis_password_file.*\\n.*none with a password",
        ),
        ({"redis_tls_ca_file": "SECRET"}, "redis_tls_ca_file.*\\n.*a redis_url with TLS"),
        ({"redis_url": "rediss://h", "redis_tls_cert_file": "SECRET"}, "redis_tls_key_file: set both"),
        (
            {"redis_sentinel_password_file": "SECRET"},
            "redis_sentinel_.*\\n.*needs a redis_url of redis-sentinel",
        ),
        ({"redis_sentinel_user": "me"}, "redis_sentinel_.*\\n.*needs a redis_url of redis-sentinel"),
    ],
)
def test_files_and_what_they_go_with(settings: dict[str, str], sentence: str, secret: str) -> None:
    chosen = {name: secret if value == "SECRET" else value for name, value in settings.items()}
    with pytest.raises(ValidationError, match=sentence) as caught:
        StoreSettings(**{"redis_url": "redis://h", **chosen})
    assert "sesame" not in str(caught.value)


def test_files_that_fit(secret: str) -> None:
    files = ("redis_tls_ca_file", "redis_tls_cert_file", "redis_tls_key_file", "redis_password_file")
    StoreSettings(redis_url="rediss-sentinel://me@h/main", **dict.fromkeys(files, secret))
    StoreSettings(redis_url="redis-sentinel://h/main", redis_sentinel_password_file=secret)
