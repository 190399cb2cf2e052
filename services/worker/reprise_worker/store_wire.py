"""What saves and loads share of the way to the store. The link's thread alone uses it."""

from collections.abc import Callable, Sequence

from reprise_core.ids import BlockHash
from reprise_runtime.shared_memory import Memory
from reprise_wire.block_transfer import (
    TRANSFER_VERSION,
    BlockKey,
    Keyspace,
    Place,
    TransferHeader,
    TransferKind,
)

MAX_BLOCKS_PER_MESSAGE = 32
MESSAGE_BYTES = 4 * 1024 * 1024
"""About so many block bytes per message, so that fetching, copying and checking overlap."""

Frame = bytes | memoryview
Send = Callable[[Sequence[Frame]], bool]
"""Sends without waiting; False when the peer is away or its queue is full."""


class StoreWire:
    """`memory` is the store's, while it shares it; then it reads ours too."""

    def __init__(self, keyspace: Keyspace, rank: int, block_nbytes: int) -> None:
        self.fingerprint = bytes.fromhex(keyspace.fingerprint)
        self.memory: Memory | None = None
        self.blocks_per_message = min(MAX_BLOCKS_PER_MESSAGE, max(1, MESSAGE_BYTES // block_nbytes))
        self._keyspace = keyspace
        self._rank = rank
        self._last_transfer_id = 0

    def key(self, group_id: int, block_hash: BlockHash) -> BlockKey:
        return BlockKey(self._rank, group_id, block_hash)

    def header(
        self,
        kind: TransferKind,
        keys: tuple[BlockKey, ...] = (),
        generation: int = 0,
        *,
        places: tuple[Place, ...] = (),
        released: tuple[int, ...] = (),
    ) -> TransferHeader:
        """With the next transfer id."""
        self._last_transfer_id += 1
        return TransferHeader(
            TRANSFER_VERSION,
            kind,
            self._last_transfer_id,
            keyspace=self._keyspace if keys else None,
            generation=generation,
            keys=keys,
            places=places,
            released=released,
        )


def refusal(reason: str) -> str:
    """The label of a REFUSED for metrics and reports."""
    return "unavailable" if reason == "unavailable" else "refused"
