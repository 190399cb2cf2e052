"""What leaves the publisher: batches as the scheduler sent them, or without what must not leave.

Every batch passes here before it is numbered, so the live stream, replays, snapshots and the gRPC stream
all tell the same.
"""

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec

from reprise_core.kv_events import BlockStored, KvEvent, KvEventBatch
from reprise_wire.event_codec import EventForm, decode_batch, encode_batch

RANDOM_SALT_KEY_BYTES = 32

BlockKeys = tuple[Any, ...] | None
"""The extra keys of one block as events carry them."""


@dataclass(frozen=True, slots=True)
class OutgoingOptions:
    token_ids: bool = True
    """False: stored events carry no token ids, for subscribers that need only hashes."""
    salt_key: bytes | None = None
    """Cache salts are replaced by their HMAC-SHA256 under this key; None = salts go out as they are."""
    form: EventForm = EventForm.MAP

    @property
    def changes_events(self) -> bool:
        return not self.token_ids or self.salt_key is not None


class Outgoing:
    """Pure: the same batch and options give the same bytes."""

    def __init__(self, options: OutgoingOptions) -> None:
        self._options = options
        self.passes_through = not options.changes_events and options.form is EventForm.MAP
        """Payloads leave byte for byte as they came."""

    def payload(self, payload: bytes) -> bytes:
        """Raises DataLoss for what is no batch, unless payloads pass through unread."""
        return payload if self.passes_through else self.encode(self.batch(decode_batch(payload)))

    def batch(self, batch: KvEventBatch) -> KvEventBatch:
        if not self._options.changes_events:
            return batch
        events = tuple(self._event(event) for event in batch.events)
        return KvEventBatch(batch.ts, events, batch.data_parallel_rank)

    def encode(self, batch: KvEventBatch) -> bytes:
        """A batch that `batch` has seen, or one made here."""
        return encode_batch(batch, form=self._options.form)

    def _event(self, event: KvEvent) -> KvEvent:
        if type(event) is not BlockStored:
            return event
        if not self._options.token_ids:
            event = msgspec.structs.replace(event, token_ids=(), lookahead_token_ids=None)
        key = self._options.salt_key
        if key is None or not event.extra_keys or not any(event.extra_keys):
            return event
        digested = tuple(_without_salts(keys, event.lora_name, key) for keys in event.extra_keys)
        return msgspec.structs.replace(event, extra_keys=digested)


def salt_position(keys: Sequence[Any] | None, lora_name: str | None) -> int | None:
    """Where the salt stands among one block's keys.

    Events carry keys untagged: the adapter's name first when there is one, (identifier, offset) pairs,
    the salt, and a digest as bytes. So the salt is the text that is not the adapter's name in its place.
    """
    for position in _texts(keys or (), lora_name):
        return position
    return None


def salt_digest(salt: str, key: bytes) -> str:
    """64 hexadecimal digits; equal salts stay equal under one key."""
    return hmac.new(key, salt.encode(), sha256).hexdigest()


def salt_key(secret: str) -> bytes:
    """The key of a secret; a random one, good for this process alone, when there is none."""
    return secret.encode() or secrets.token_bytes(RANDOM_SALT_KEY_BYTES)


def _without_salts(keys: BlockKeys, lora_name: str | None, key: bytes) -> BlockKeys:
    """Every text that could be a salt is replaced: other engines' events may hold more than one, and a
    salt too many digested is better than one that leaves."""
    if not keys:
        return keys
    changed = list(keys)
    for position in _texts(keys, lora_name):
        changed[position] = salt_digest(keys[position], key)
    return tuple(changed)


def _texts(keys: Sequence[Any], lora_name: str | None) -> list[int]:
    first = 1 if lora_name and keys and keys[0] == lora_name else 0
    return [position for position in range(first, len(keys)) if isinstance(keys[position], str)]
