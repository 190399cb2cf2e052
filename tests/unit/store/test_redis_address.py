"""What a Redis URL means, and what is refused."""

import pytest

from reprise_store.redis_address import RedisAddress, RedisKind, parse_redis_url


def address(kind: RedisKind, **facts: object) -> RedisAddress:
    defaults: dict[str, object] = {
        "tls": False, "hosts": (), "path": "", "service": "", "user": "", "password": "", "db": 0,
    }  # fmt: skip
    return RedisAddress(kind=kind, **{**defaults, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://localhost", address(RedisKind.SINGLE, hosts=(("localhost", 6379),))),
        ("redis://", address(RedisKind.SINGLE, hosts=(("localhost", 6379),))),
        ("valkey://h:1/3", address(RedisKind.SINGLE, hosts=(("h", 1),), db=3)),
        ("valkeys://h:1", address(RedisKind.SINGLE, tls=True, hosts=(("h", 1),))),
        (
            "rediss://us%40er:p%2Fw%3A@[::1]:7/1",
            address(RedisKind.SINGLE, tls=True, hosts=(("::1", 7),), user="us@er", password="p/w:", db=1),
        ),
        ("unix:///run/redis.sock", address(RedisKind.UNIX, path="/run/redis.sock")),
        (
            "unix://:pw@/run/r%20.sock?db=2",
            address(RedisKind.UNIX, path="/run/r .sock", password="pw", db=2),
        ),
        ("valkey+unix:///run/v.sock", address(RedisKind.UNIX, path="/run/v.sock")),
        (
            "redis-sentinel://u:p@h1,h2:7/main/4",
            address(
                RedisKind.SENTINEL,
                hosts=(("h1", 26379), ("h2", 7)),
                service="main",
                user="u",
                password="p",
                db=4,
            ),
        ),
        (
            "rediss-sentinel://h1/main",
            address(RedisKind.SENTINEL, tls=True, hosts=(("h1", 26379),), service="main"),
        ),
        ("redis-cluster://h1,h2:7", address(RedisKind.CLUSTER, hosts=(("h1", 6379), ("h2", 7)))),
        ("valkeys-cluster://h1/0", address(RedisKind.CLUSTER, tls=True, hosts=(("h1", 6379),))),
    ],
)
def test_urls(url: str, expected: RedisAddress) -> None:
    assert parse_redis_url(url) == expected


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://x", "start with one of redis://"),
        ("127.0.0.1:6379", "start with one of"),
        ("redis://h:port", "a port number"),
        ("redis://h:70000", "a port number"),
        ("redis://h1,h2", "one host"),
        ("redis://h/one", "number of a database"),
        ("redis://h?ssl_cert_reqs=none", "no options"),
        ("unix://run/redis.sock", "path of a socket"),
        ("redis-sentinel://h1,h2", "name the service"),
        ("redis-sentinel://h1,,h2/main", "a host before each"),
        ("redis-cluster://", "a host before each"),
        ("redis-cluster://h/2", "a cluster has 0 alone"),
    ],
)
def test_what_is_wrong_is_named_and_the_password_is_not(url: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_redis_url(url)
    scheme, separator, rest = url.partition("://")
    if separator:
        with pytest.raises(ValueError, match=sentence) as caught:
            parse_redis_url(f"{scheme}://me:sesame@{rest}")
        assert "sesame" not in str(caught.value)
