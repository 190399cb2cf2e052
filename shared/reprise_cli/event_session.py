"""What the `reprise events` commands have in common: one source that is followed, and the keys to it."""

import time
from collections.abc import Callable
from pathlib import Path

import zmq

from reprise_core.errors import InvalidInput
from reprise_wire.event_source import EventSource
from reprise_wire.event_source_values import Delivery, Notice, SourceOptions
from reprise_wire.event_subscriber import EventSubscriber
from reprise_wire.source_sockets import ClientKeys, SourceAddress

TURN_S = 0.2
"""The longest wait between two looks at the clock."""


def read_keys(server_key: Path | None, client_key: Path | None) -> ClientKeys | None:
    """None without a server's key. Raises InvalidInput that names the option."""
    if server_key is None:
        if client_key is not None:
            raise InvalidInput("--key", "needs --server-key, the publisher's public key")
        return None
    if client_key is None:
        public, secret = zmq.curve_keypair()
    else:
        secret = _read_key("--key", client_key)
        public = zmq.curve_public(secret)
    return ClientKeys(_read_key("--server-key", server_key), public, secret)


def _read_key(option: str, path: Path) -> bytes:
    try:
        words = path.read_text().split()
        key = words[0].encode() if words else b""
        zmq.curve_public(key)
    except (OSError, ValueError, KeyError, zmq.ZMQError) as error:
        raise InvalidInput(option, f"{path}: {error}; must be a file with a Z85 key") from error
    return key


class Session:
    """One source, followed until something says that it is enough."""

    def __init__(
        self,
        address: SourceAddress,
        options: SourceOptions,
        *,
        on_delivery: Callable[[Delivery], None],
        on_notice: Callable[[Notice], None],
    ) -> None:
        self._subscriber = EventSubscriber(on_delivery=on_delivery, on_notice=on_notice)
        try:
            self.source: EventSource = self._subscriber.add(address, options)
        except InvalidInput as error:
            self._subscriber.close()
            option = {"endpoint": "--endpoint", "replay_endpoint": "--replay"}[error.field]
            raise InvalidInput(option, error.problem) from error

    def run(self, is_done: Callable[[], bool], *, for_s: float = 0.0) -> None:
        """Until `is_done`, which is asked every TURN_S at least, until the time is up, or until Ctrl-C."""
        end_s = time.monotonic() + for_s if for_s else None
        try:
            while not is_done() and (end_s is None or time.monotonic() < end_s):
                self._subscriber.turn(TURN_S)
        except KeyboardInterrupt:
            return
        finally:
            self._subscriber.close()
