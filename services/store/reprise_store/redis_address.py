"""Where Redis is: the URL of the settings, taken apart and checked.

    redis://[user:password@]host[:port][/db]                     one server
    unix://[user:password@]/path/to/socket[?db=N]                one server of this machine
    redis-sentinel://[user:password@]h1[:port],h2/service[/db]   the primary that the sentinels name
    redis-cluster://[user:password@]h1[:port],h2                 a cluster, found through any of its nodes

`rediss` instead of `redis` is TLS, `valkey` and `valkeys` mean the same; unix has `valkey+unix` too.
User and password are percent-encoded, as in every URL.
"""

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import parse_qs, unquote, urlsplit

REDIS_PORT = 6379
SENTINEL_PORT = 26379


class RedisKind(StrEnum):
    SINGLE = "single"
    UNIX = "unix"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_TCP_KINDS = {"": RedisKind.SINGLE, "-sentinel": RedisKind.SENTINEL, "-cluster": RedisKind.CLUSTER}
_SCHEMES: dict[str, tuple[RedisKind, bool]] = {
    **{
        f"{name}{suffix}": (kind, name in ("rediss", "valkeys"))
        for suffix, kind in _TCP_KINDS.items()
        for name in ("redis", "rediss", "valkey", "valkeys")
    },
    "unix": (RedisKind.UNIX, False),
    "valkey+unix": (RedisKind.UNIX, False),
}


@dataclass(frozen=True, slots=True)
class RedisAddress:
    kind: RedisKind
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    """The server, the sentinels, or some nodes of the cluster; none for a socket."""
    path: str
    """Of the Unix socket."""
    service: str
    """The name that sentinels know the primary by."""
    user: str
    password: str
    db: int


def parse_redis_url(url: str) -> RedisAddress:
    """Raises ValueError with what is allowed; the text never holds the password."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ValueError(f"must be empty or start with one of {', '.join(s + '://' for s in _SCHEMES)}")
    kind, tls = _SCHEMES[scheme]
    rest, _, query = rest.partition("?")
    place, path = (rest, "") if kind is RedisKind.UNIX else _cut(rest, "/")
    login, at, where = place.rpartition("@")
    user, password = (unquote(part) for part in _cut(login, ":")) if at else ("", "")
    service, db_text = _cut(path, "/") if kind is RedisKind.SENTINEL else ("", path)
    if kind is RedisKind.SENTINEL and not service:
        raise ValueError(f"{scheme}:// must name the service after the sentinels: /service or /service/db")
    if kind is RedisKind.UNIX and not where.startswith("/"):
        raise ValueError(f"{scheme}:// must be followed by the path of a socket, from /")
    db = _db(kind, db_text, query)
    if kind is RedisKind.CLUSTER and db:
        raise ValueError(f"database {db}: a cluster has 0 alone")
    hosts = () if kind is RedisKind.UNIX else _hosts(kind, where)
    return RedisAddress(
        kind, tls, hosts, unquote(where) if kind is RedisKind.UNIX else "", service, user, password, db
    )


def _hosts(kind: RedisKind, text: str) -> tuple[tuple[str, int], ...]:
    names = text.split(",")
    if len(names) > 1 and kind is RedisKind.SINGLE:
        raise ValueError("must name one host; several are for redis-sentinel:// and redis-cluster://")
    hosts = []
    for name in names:
        try:
            parts = urlsplit(f"//{name}")
            port = parts.port
        except ValueError:
            raise ValueError("must have a port number, or none, after each host") from None
        if not parts.hostname and (kind is not RedisKind.SINGLE or name):
            raise ValueError("must have a host before each port and comma")
        default = SENTINEL_PORT if kind is RedisKind.SENTINEL else REDIS_PORT
        hosts.append((parts.hostname or "localhost", default if port is None else port))
    return tuple(hosts)


def _db(kind: RedisKind, text: str, query: str) -> int:
    options = parse_qs(query, keep_blank_values=True)
    if kind is RedisKind.UNIX and set(options) == {"db"}:
        text = options.pop("db")[-1]
    if options:
        raise ValueError("takes no options after ? but db of a unix socket; see the REDIS_ settings")
    if text and not text.isdecimal():
        raise ValueError("must have the number of a database, or nothing, at the end")
    return int(text or 0)


def _cut(text: str, separator: str) -> tuple[str, str]:
    before, _, after = text.partition(separator)
    return before, after
