"""Settings that would fail later fail at start."""

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
    ],
)
def test_what_is_wrong_is_named_and_passwords_are_not_shown(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        StoreSettings(**settings)
