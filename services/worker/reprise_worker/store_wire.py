"""What saves and loads share of the way to the store. The link's thread alone uses it."""

import hashlib
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from reprise_core.ids import BlockHash
from reprise_runtime.shared_memory import Memory
from reprise_wire.block_transfer import (
    TRANSFER_VERSION,
    BlockKey,
    Keyspace,
    Place,
    TransferHeader,
    TransferKind,
    redis_keys,
)
from reprise_wire.host_index import HostIndex

MAX_BLOCKS_PER_MESSAGE = 64
MESSAGE_BYTES = 4 * 1024 * 1024
"""About so many block bytes per message: a message costs the store's and the worker's threads some 0.2 ms,
and with many of them fetching, copying and checking overlap."""

Frame = bytes | memoryview
Send = Callable[[Sequence[Frame]], bool]
"""Sends without waiting; False when the peer is away or its queue is full."""


class StoreWire:
    """`memory` is the store's, and `index` says what is in it, while it shares it; then it reads ours too."""

    def __init__(
        self, keyspace: Keyspace, rank: int, block_nbytes: int, *, adapters: Sequence[str] = ()
    ) -> None:
        """`keyspace`: the model's own blocks'. `adapters`: content digests, in the order of their ids."""
        self.memory: Memory | None = None
        self.index: HostIndex | None = None
        self.blocks_per_message = min(MAX_BLOCKS_PER_MESSAGE, max(1, MESSAGE_BYTES // block_nbytes))
        self._keyspaces = (keyspace, *(replace(keyspace, adapter=digest) for digest in adapters))
        self.fingerprints = tuple(_block_fingerprint(keyspace) for keyspace in self._keyspaces)
        """By adapter id: what the headers of its blocks name."""
        self._rank = rank
        self._last_transfer_id = 0

    def key(self, group_id: int, block_hash: BlockHash) -> BlockKey:
        return BlockKey(self._rank, group_id, block_hash)

    def names(self, keys: Sequence[BlockKey], generation: int, *, adapter_id: int = 0) -> list[str]:
        """What the blocks are called in the store's index."""
        return redis_keys(self._keyspaces[adapter_id], generation, keys)

    def header(
        self,
        kind: TransferKind,
        keys: tuple[BlockKey, ...] = (),
        generation: int = 0,
        *,
        adapter_id: int = 0,
        places: tuple[Place, ...] = (),
        released: tuple[int, ...] = (),
    ) -> TransferHeader:
        """With the next transfer id."""
        self._last_transfer_id += 1
        return TransferHeader(
            TRANSFER_VERSION,
            kind,
            self._last_transfer_id,
            keyspace=self._keyspaces[adapter_id] if keys else None,
            generation=generation,
            keys=keys,
            places=places,
            released=released,
        )


def _block_fingerprint(keyspace: Keyspace) -> bytes:
    """The model's; with an adapter a digest of both: a value under another adapter's key is foreign."""
    if not keyspace.adapter:
        return bytes.fromhex(keyspace.fingerprint)
    both = f"{keyspace.fingerprint}:{keyspace.adapter}".encode()
    return hashlib.blake2b(both, digest_size=16).digest()


def refusal(reason: str) -> str:
    """The label of a REFUSED for metrics and reports."""
    return "unavailable" if reason == "unavailable" else "refused"
