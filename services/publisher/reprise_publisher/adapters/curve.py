"""CURVE on the sockets that subscribers connect to: encrypted, and only for the keys that are allowed.

Keys are Z85 text, 40 characters. The secret file has the server's secret key; its public key follows from
it. Allowed keys are lines of a file, or of all files of a folder. A line that begins with `#` is a comment
(keys hold that sign too, but none begins with it), and what follows a key on its line is its name.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from reprise_core.errors import InvalidInput

ANY_KEY = "any"
KEY_CHARACTERS = 40
ZAP_DOMAIN = "reprise.events"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    secret: bytes = field(repr=False)
    allowed: frozenset[bytes] | None
    """None = every client that knows our public key."""

    @property
    def public(self) -> bytes:
        return zmq.curve_public(self.secret)


def read_curve_keys(secret_key_file: str, allowed_keys_file: str) -> CurveKeys | None:
    """None without a secret key. Raises InvalidInput that names the setting."""
    if not secret_key_file:
        if allowed_keys_file:
            raise InvalidInput("curve_allowed_keys_file", "set without curve_secret_key_file")
        return None
    secrets = _read_keys("curve_secret_key_file", Path(secret_key_file))
    if len(secrets) != 1:
        raise InvalidInput("curve_secret_key_file", f"{secret_key_file}: {len(secrets)} keys, must have 1")
    if not allowed_keys_file:
        raise InvalidInput("curve_allowed_keys_file", f"must be a file or folder of keys, or {ANY_KEY!r}")
    if allowed_keys_file == ANY_KEY:
        return CurveKeys(secrets[0], None)
    allowed = _read_keys("curve_allowed_keys_file", Path(allowed_keys_file))
    if not allowed:
        raise InvalidInput("curve_allowed_keys_file", f"{allowed_keys_file}: no keys, nobody could connect")
    return CurveKeys(secrets[0], frozenset(allowed))


class CurveGate:
    """Answers for the sockets of one context who may connect; a thread of its own, from `start` to `stop`.

    `on_refused` is called in that thread.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", keys: CurveKeys, on_refused: Callable[[], None]
    ) -> None:
        self._keys = keys
        self._on_refused = on_refused
        self._authenticator = ThreadAuthenticator(context)

    def start(self) -> None:
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=self)

    def stop(self) -> None:
        self._authenticator.stop()

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        """Before it binds or connects; also one that connects is the server here."""
        socket.curve_server = True
        socket.curve_secretkey = self._keys.secret
        socket.zap_domain = ZAP_DOMAIN.encode()
        # Without this a client is let in when nobody answers for the domain.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def callback(self, domain: str, key: bytes) -> bool:
        """pyzmq asks; `key` is the client's in Z85, and the handshake has proved it."""
        allowed = self._keys.allowed is None or key in self._keys.allowed
        if not allowed:
            self._on_refused()
        return allowed


def _read_keys(setting: str, path: Path) -> list[bytes]:
    try:
        files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
        lines = [line for file in files for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(setting, f"{path}: {getattr(error, 'strerror', None) or error}") from error
    words = [line.split() for line in lines if not line.startswith("#")]
    keys = [line[0].encode() for line in words if line]
    for key in keys:
        if not _is_key(key):
            raise InvalidInput(setting, f"{path}: a line is no Z85 key of {KEY_CHARACTERS} characters")
    return keys


def _is_key(key: bytes) -> bool:
    if len(key) != KEY_CHARACTERS:
        return False
    try:
        z85.decode(key)
    except (KeyError, ValueError, struct.error):
        return False
    return True
