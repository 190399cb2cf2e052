"""KV events: what a cache tells the world about its blocks.

The structs are laid out for the wire form of the reference (a map whose first pair is `type`; fields
without a default are always written, the others only when they are not None), so that a batch can be
encoded without a copy. `reprise_wire.event_codec` does that and knows the other forms.

A consumer counts stores per hash: twins of a block are stored and removed one by one.
"""

from typing import Any, Final

import msgspec

from reprise_core.hash_algorithms import external_hash
from reprise_core.ids import BlockHash

ExternalHash = int | bytes
"""A block hash in events: the low 64 bits of the digest, or the digest, by the engine's switch."""

MEDIUM_DEVICE: Final = "GPU"
MEDIUM_HOST: Final = "CPU"
MEDIUM_STORAGE: Final = "STORAGE"
MEDIUM_EXTERNAL: Final = "EXTERNAL"
"""Shared by engines, who may evict from it without notice."""


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    """Consecutive blocks of one chain became available.

    In a dense event len(token_ids) == len(block_hashes) * block_size; tiers below the device may
    send none. `parent_block_hash` is None when the chain begins here. `extra_keys` (of
    `extra_keys.EventExtraKey`; from another engine, of anything) and `lookahead_token_ids` have one
    entry per block.
    """

    block_hashes: tuple[ExternalHash, ...]
    parent_block_hash: ExternalHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: tuple[tuple[int, ...], ...] | None = None
    report: bool | None = None
    """Ours, in maps only. True: these blocks were there already and are named again for whoever does
    not know them. No copy of them was added, so a consumer must not count this store."""


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    block_hashes: tuple[ExternalHash, ...]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type", tag=True):
    """The whole cache of this source is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one step, in order. `ts` is wall time in seconds."""

    ts: float
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None


def event_hash(block_hash: BlockHash, *, as_integer: bool) -> ExternalHash:
    return external_hash(block_hash) if as_integer else bytes(block_hash)
