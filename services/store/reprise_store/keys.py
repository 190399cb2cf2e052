"""Whose blocks, checked: keyspaces come from outside and become parts of Redis keys."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reprise_core.errors import InvalidInput
from reprise_wire.block_transfer import BlockKey, Keyspace

MAX_TP_SIZE = 1024
MAX_GROUP_ID = 2**32 - 1
HASH_NBYTES = (16, 32)
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_ADAPTER = re.compile(r"([0-9a-f]{8,128})?")


class Scope(NamedTuple):
    """What one generation number covers: a model in a namespace, with all its adapters and ranks."""

    namespace: str
    fingerprint: str


def scope_of(keyspace: Keyspace) -> Scope:
    return Scope(keyspace.namespace, keyspace.fingerprint)


def check_keyspace(keyspace: Keyspace) -> None:
    """Raises InvalidInput. A colon or a glob sign in a part could name another model's keys."""
    _check(_NAMESPACE, "keyspace.namespace", keyspace.namespace, "1 to 64 letters, digits, '.', '_' or '-'")
    _check(_FINGERPRINT, "keyspace.fingerprint", keyspace.fingerprint, "32 hexadecimal digits, lower case")
    _check(_ADAPTER, "keyspace.adapter", keyspace.adapter, "empty or 8 to 128 hexadecimal digits, lower case")
    if not 1 <= keyspace.tp_size <= MAX_TP_SIZE:
        raise InvalidInput("keyspace.tp_size", f"{keyspace.tp_size} is not within 1..{MAX_TP_SIZE}")


def check_hashes(field: str, block_hashes: Iterable[bytes]) -> None:
    """`field` has {} where the index belongs."""
    for index, block_hash in enumerate(block_hashes):
        if len(block_hash) not in HASH_NBYTES:
            raise InvalidInput(field.format(index), f"{len(block_hash)} bytes, must be 16 or 32")


def check_keys(keyspace: Keyspace, keys: Sequence[BlockKey]) -> None:
    check_hashes("keys[{}].block_hash", (key.block_hash for key in keys))
    for index, key in enumerate(keys):
        if not 0 <= key.rank < keyspace.tp_size:
            raise InvalidInput(f"keys[{index}].rank", f"{key.rank} is not within 0..{keyspace.tp_size - 1}")
        if not 0 <= key.group_id <= MAX_GROUP_ID:
            raise InvalidInput(f"keys[{index}].group_id", f"{key.group_id} is not within 0..{MAX_GROUP_ID}")


def _check(pattern: re.Pattern[str], field: str, value: str, allowed: str) -> None:
    if not pattern.fullmatch(value):
        raise InvalidInput(field, f"{value[:80]!r} must be {allowed}")
