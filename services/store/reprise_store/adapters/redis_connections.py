"""From settings to connections: credentials, TLS, sentinels."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

from redis import connection as redis_connection
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from reprise_store.adapters.redis_node import Connection, RedisNode
from reprise_store.adapters.resp_parser import Allocate, BlockParser
from reprise_store.ports import Value
from reprise_store.redis_address import RedisAddress

MAX_PIECES_AT_ONCE = 512
"""In one system call, which takes 1024."""


class _Pipelines:
    """What redis-py's connections lack: pieces of memory sent together, and all the answers read by our
    parser in one go."""

    _parser: BlockParser
    _sock: Any

    def send_pieces(self, pieces: Sequence[Value], deadline_s: float) -> None:
        """Raises OSError or RedisError; the time is looked at whenever the socket took something."""
        left = deque(memoryview(piece) for piece in pieces)
        while left:
            num_sent = self._send_some(left)
            if monotonic() > deadline_s:
                raise RedisTimeoutError("the round trip takes too long")
            while left and num_sent >= len(left[0]):
                num_sent -= len(left.popleft())
            if num_sent:
                left[0] = left[0][num_sent:]

    def _send_some(self, pieces: deque[memoryview]) -> int:
        num_sent: int = self._sock.sendmsg(list(islice(pieces, MAX_PIECES_AT_ONCE)))
        return num_sent

    def read_responses(self, count: int, timeout_s: float) -> list[Any]:
        return self._parser.read_responses(count, timeout_s)


class _TcpConnection(_Pipelines, redis_connection.Connection):
    pass


class _TlsConnection(_Pipelines, redis_connection.SSLConnection):
    def _send_some(self, pieces: deque[memoryview]) -> int:
        num_sent: int = self._sock.send(pieces[0])
        return num_sent


class _SocketConnection(_Pipelines, redis_connection.UnixDomainSocketConnection):
    pass


@dataclass(frozen=True, slots=True)
class RedisSecurity:
    """Empty = not used."""

    password_file: str = ""
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    sentinel_user: str = ""
    sentinel_password_file: str = ""


class FileCredentials(CredentialProvider):
    """Read anew for each connection, so a password that was changed is taken up."""

    def __init__(self, user: str, path: str) -> None:
        self._user = user
        self._path = Path(path)

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = self._path.read_text().rstrip("\r\n")
        except OSError as error:
            raise AuthenticationError(f"cannot read {self._path}: {error.strerror}") from error
        return (self._user, password) if self._user else (password,)


class Connector:
    """Makes connections of one configuration; nothing is opened before the first use."""

    def __init__(
        self,
        address: RedisAddress,
        security: RedisSecurity,
        *,
        timeout_s: float,
        allocate: Allocate,
        max_bulk_bytes: int,
    ) -> None:
        self._address = address
        self._security = security
        self._timeout_s = timeout_s
        self._common: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "parser_class": partial(
                BlockParser, allocate=allocate, max_bulk_bytes=max_bulk_bytes, scatters=not address.tls
            ),
            "client_name": "reprise-store",
            "driver_info": None,
        }
        if address.tls:
            self._common |= {
                "ssl_ca_certs": security.tls_ca_file or None,
                "ssl_certfile": security.tls_cert_file or None,
                "ssl_keyfile": security.tls_key_file or None,
            }
        login = _login(address.user, address.password, security.password_file)
        self._options = self._common | login | {"db": address.db}

    def to_socket(self) -> Connection:
        kind: Any = _SocketConnection
        connection: Connection = kind(path=self._address.path, **self._options)
        return connection

    def to_host(self, host: str, port: int) -> Connection:
        return self._connect(host, port, self._options)

    def to_primary(self) -> Callable[[], Connection]:
        """Asks the sentinels before each new connection."""
        security = self._security
        login = _login(security.sentinel_user, "", security.sentinel_password_file)
        options = self._common | login
        sentinels = _Sentinels(
            [
                RedisNode(f"sentinel {host}:{port}", partial(self._connect, host, port, options))
                for host, port in self._address.hosts
            ],
            self._address.service,
            self._timeout_s,
        )
        return lambda: self.to_host(*sentinels.primary())

    def _connect(self, host: str, port: int, options: dict[str, Any]) -> Connection:
        tls = self._address.tls
        kind: Any = _TlsConnection if tls else _TcpConnection
        connection: Connection = kind(host=host, port=port, **options)
        return connection


class _Sentinels:
    """Asked in turn, the one that answered last first. Any thread may call."""

    def __init__(self, nodes: Sequence[RedisNode], service: str, timeout_s: float) -> None:
        self._nodes = list(nodes)
        self._service = service
        self._timeout_s = timeout_s

    def primary(self) -> tuple[str, int]:
        question = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode())
        problems = []
        for node in (nodes := self._nodes):
            try:
                (answer,) = node.round_trip([question], self._timeout_s)
            except (RedisError, OSError) as error:
                problems.append(f"{node.name}: {type(error).__name__}")
                continue
            if isinstance(answer, list):
                self._nodes = [node, *(other for other in nodes if other is not node)]
                host, port = answer
                return host.decode(), int(port)
            problems.append(f"{node.name}: {answer or 'does not know it'}")
        raise RedisConnectionError(f"no primary of {self._service}: {'; '.join(problems)}")


def _login(user: str, password: str, password_file: str) -> dict[str, Any]:
    if password_file:
        return {"credential_provider": FileCredentials(user, password_file)}
    return {"username": user or None, "password": password or None}
