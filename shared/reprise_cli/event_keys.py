"""`reprise events keygen`: a CURVE key pair for a publisher or for a subscriber."""

import os
from pathlib import Path

import typer
import zmq

MODE = 0o600


def keygen(path: Path) -> None:
    """The secret key goes to `path`, the public one to `path`.pub, both Z85; files that exist are kept."""
    public_path = path.with_name(path.name + ".pub")
    for taken in (path, public_path):
        if taken.exists():
            raise typer.BadParameter(f"{taken} exists")
    public, secret = zmq.curve_keypair()
    _write(path, secret)
    _write(public_path, public)
    typer.echo(f"secret key: {path}\npublic key: {public_path}")


def _write(path: Path, key: bytes) -> None:
    """Never readable by others, not even for a moment."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n")
