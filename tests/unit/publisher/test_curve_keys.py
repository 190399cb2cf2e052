"""Key files of CURVE."""

from pathlib import Path

import pytest
import zmq

from reprise_core.errors import InvalidInput
from reprise_publisher.adapters.curve import read_curve_keys

PUBLIC, SECRET = zmq.curve_keypair()
CLIENT, _ = zmq.curve_keypair()
OTHER, _ = zmq.curve_keypair()


def write(path: Path, *lines: bytes) -> str:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def test_no_keys_is_plain() -> None:
    assert read_curve_keys("", "") is None


def test_the_public_key_follows_from_the_secret_one(tmp_path: Path) -> None:
    keys = read_curve_keys(write(tmp_path / "secret", SECRET), "any")
    assert keys is not None
    assert keys.public == PUBLIC
    assert keys.allowed is None
    assert SECRET.decode() not in repr(keys)


def test_allowed_keys_of_a_file_and_of_a_folder(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret", SECRET)
    file = write(tmp_path / "allowed", b"# who may listen", b"", CLIENT + b" router-1", OTHER)
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "a.pub", CLIENT)
    write(folder / "b.pub", OTHER)
    expected = frozenset((CLIENT, OTHER))
    for allowed in (file, str(folder)):
        keys = read_curve_keys(secret, allowed)
        assert keys is not None
        assert keys.allowed == expected


@pytest.mark.parametrize(
    ("secret", "allowed", "problem"),
    [
        (None, b"x", "curve_allowed_keys_file: set without"),
        (SECRET, None, "curve_allowed_keys_file: must be a file or folder of keys, or 'any'"),
        (SECRET, b"# nobody yet", "no keys, nobody could connect"),
        (SECRET, CLIENT[:-1], "no Z85 key"),
        (SECRET, CLIENT[:-1] + b"~", "no Z85 key"),
        (SECRET, b"%" * 40, "no Z85 key"),
        (SECRET + b"\n" + SECRET, CLIENT, "curve_secret_key_file: .*2 keys"),
        (b"", CLIENT, "curve_secret_key_file: .*0 keys"),
    ],
    ids=["allowed alone", "secret alone", "empty", "short", "character", "number", "two", "none"],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, secret: bytes | None, allowed: bytes | None, problem: str
) -> None:
    secret_file = write(tmp_path / "secret", secret) if secret is not None else ""
    allowed_file = write(tmp_path / "allowed", allowed) if allowed is not None else ""
    with pytest.raises(InvalidInput, match=problem):
        read_curve_keys(secret_file, allowed_file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nowhere: No such file"):
        read_curve_keys(str(tmp_path / "nowhere"), "any")
