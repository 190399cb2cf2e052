"""From settings to connections: credentials, TLS, sentinels."""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from ssl import SSLWantReadError, SSLWantWriteError
from typing import Any

from redis import connection as redis_connection
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from reprise_store.adapters.redis_node import Connection
from reprise_store.adapters.resp_parser import Allocate, BlockParser
from reprise_store.redis_address import RedisAddress

MAX_PIECES_AT_ONCE = 512
"""In one system call, which takes 1024."""


class _Pipelines:
    """What redis-py's connections lack: pieces of memory sent together, and all the answers read by our
    parser in one go, neither of which blocks."""

    _parser: BlockParser
    _sock: Any

    def stop_blocking(self) -> None:
        self._sock.setblocking(False)

    def fileno(self) -> int:
        number: int = self._sock.fileno()
        return number

    def send_some(self, pieces: deque[memoryview]) -> None:
        """Takes from the pieces what the socket takes now."""
        try:
            while pieces:
                num_sent = self._send(pieces)
                while pieces and num_sent >= len(pieces[0]):
                    num_sent -= len(pieces.popleft())
                if num_sent:
                    pieces[0] = pieces[0][num_sent:]
        except (BlockingIOError, SSLWantReadError, SSLWantWriteError):
            return

    def _send(self, pieces: deque[memoryview]) -> int:
        num_sent: int = self._sock.sendmsg(list(islice(pieces, MAX_PIECES_AT_ONCE)))
        return num_sent

    def responses(self, count: int) -> Generator[None, None, list[Any]]:
        return self._parser.responses(count)


class _TcpConnection(_Pipelines, redis_connection.Connection):
    pass


class _TlsConnection(_Pipelines, redis_connection.SSLConnection):
    def _send(self, pieces: deque[memoryview]) -> int:
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
            {
                f"sentinel {host}:{port}": partial(self._connect, host, port, options)
                for host, port in self._address.hosts
            },
            self._address.service,
        )
        return lambda: self.to_host(*sentinels.primary())

    def _connect(self, host: str, port: int, options: dict[str, Any]) -> Connection:
        tls = self._address.tls
        kind: Any = _TlsConnection if tls else _TcpConnection
        connection: Connection = kind(host=host, port=port, **options)
        return connection


class _Sentinels:
    """Asked in turn, the one that answered last first. Any thread may call; a call blocks."""

    def __init__(self, sentinels: dict[str, Callable[[], Connection]], service: str) -> None:
        self._sentinels = sentinels
        self._names = list(sentinels)
        self._service = service

    def primary(self) -> tuple[str, int]:
        problems = []
        for name in (names := self._names):
            try:
                answer = self._ask(self._sentinels[name]())
            except (RedisError, OSError) as error:
                words = error if isinstance(error, ResponseError) else type(error).__name__
                problems.append(f"{name}: {words}")
                continue
            if isinstance(answer, list):
                self._names = [name, *(other for other in names if other != name)]
                host, port = answer
                return host.decode(), int(port)
            problems.append(f"{name}: does not know it")
        raise RedisConnectionError(f"no primary of {self._service}: {'; '.join(problems)}")

    def _ask(self, connection: Connection) -> Any:
        try:
            connection.connect()
            connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
            return connection.read_response()
        finally:
            connection.disconnect()


def _login(user: str, password: str, password_file: str) -> dict[str, Any]:
    if password_file:
        return {"credential_provider": FileCredentials(user, password_file)}
    return {"username": user or None, "password": password or None}
