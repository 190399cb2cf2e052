"""Host and port as one text: `127.0.0.1:9201`, `[::1]:9201`, `:9201` (all interfaces)."""

from reprise_core.errors import InvalidInput


def split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise InvalidInput("address", f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
