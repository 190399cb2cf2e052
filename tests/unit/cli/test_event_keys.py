"""`reprise events keygen`."""

import stat
from pathlib import Path

import pytest
import typer
import zmq

from reprise_cli.event_keys import keygen


def test_a_pair_that_fits_together_and_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "publisher.key"
    keygen(path)
    public = tmp_path / "publisher.key.pub"
    assert zmq.curve_public(path.read_bytes().strip()) == public.read_bytes().strip()
    assert {stat.S_IMODE(file.stat().st_mode) for file in (path, public)} == {0o600}


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    keygen(path)
    secret = path.read_bytes()
    with pytest.raises(typer.BadParameter, match="exists"):
        keygen(path)
    assert path.read_bytes() == secret


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="No such file"):
        keygen(tmp_path / "missing" / "key")
