"""KV events as messages of smg's gRPC stream (`smg.grpc.common`, package smg-grpc-proto).

Hashes are signed there: the two's complement of the same 64 bits; a digest gives its low 64 bits. A
consumer indexes blocks by their tokens and loses what it knew of a hash when a later store of it has
none, so a stored event of full attention whose tokens are not at hand is left out (`Untellable`).
"""

from typing import Any, Final

import msgspec
from smg_grpc_proto.generated import common_pb2 as pb

from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, ExternalHash, KvEvent
from reprise_publisher.outgoing import salt_position

FULL_ATTENTION: Final = "full_attention"
MAX_TOKEN: Final = 2**32 - 1
_SIGN: Final = 1 << 63
_MASK: Final = (1 << 64) - 1

_TIERS: Final = {
    None: pb.KV_CACHE_TIER_DEVICE,
    "GPU": pb.KV_CACHE_TIER_DEVICE,
    "CPU": pb.KV_CACHE_TIER_HOST,
    "CPU_PINNED": pb.KV_CACHE_TIER_HOST,
    "CPU_TIER1": pb.KV_CACHE_TIER_HOST,
    "STORAGE": pb.KV_CACHE_TIER_DISK,
    "DISK": pb.KV_CACHE_TIER_DISK,
}
"""A medium that is not named here is taken for the external tier, which nobody counts as the device's."""
_LEVELS: Final = {
    pb.KV_CACHE_TIER_DEVICE: 0,
    pb.KV_CACHE_TIER_HOST: 1,
    pb.KV_CACHE_TIER_DISK: 2,
    pb.KV_CACHE_TIER_EXTERNAL: 3,
}
_LOCALITIES: Final = {"LOCAL": pb.KV_CACHE_LOCALITY_LOCAL, "REMOTE": pb.KV_CACHE_LOCALITY_REMOTE}


class Untellable(Exception):
    """An event that the stream cannot say; `cause` is a metric's label."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


def signed_hash(block_hash: ExternalHash) -> int:
    number = block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")
    number &= _MASK
    return number - (1 << 64) if number & _SIGN else number


def event_to_proto(event: KvEvent, *, event_id: int, needs_tokens: bool = True) -> pb.KvCacheEvent:
    """Raises Untellable. `needs_tokens=False`: nobody here gets tokens, so none are missed."""
    try:
        match event:
            case BlockStored():
                return pb.KvCacheEvent(event_id=event_id, stored=_stored(event, needs_tokens))
            case BlockRemoved():
                return pb.KvCacheEvent(event_id=event_id, removed=_removed(event))
            case AllBlocksCleared():
                return pb.KvCacheEvent(event_id=event_id, cleared=pb.KvCacheCleared())
    except (ValueError, TypeError) as error:  # a number beyond its field's range, or no number
        raise Untellable("malformed") from error


def is_dense(event: BlockStored) -> bool:
    return event.block_size > 0 and len(event.token_ids) == len(event.block_hashes) * event.block_size


def lacks_tokens(event: KvEvent) -> bool:
    """A stored event of full attention that does not say the tokens of each block."""
    return (
        type(event) is BlockStored
        and event.kv_cache_spec_kind in (None, FULL_ATTENTION)
        and not is_dense(event)
    )


def _stored(event: BlockStored, needs_tokens: bool) -> pb.KvBlocksStored:
    if event.report:
        # A consumer would count a copy more. Whoever can tell what is new in it has done so before.
        raise Untellable("report")
    if needs_tokens and lacks_tokens(event):
        raise Untellable("no_tokens")
    tier = _tier(event.medium)
    message = pb.KvBlocksStored(
        blocks=_blocks(event, _LEVELS[tier]),
        tier=tier,
        medium=event.medium,
        group_idx=event.group_idx,
        kv_cache_spec_kind=event.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
        locality=_LOCALITIES.get((event.locality or "").upper()),
        ownership=event.ownership,
        session_id=event.session_id,
        lora_name=event.lora_name,
        cache_salt=_cache_salt(event),
    )
    if event.parent_block_hash is not None:
        message.parent_block_hash = signed_hash(event.parent_block_hash)
    return message


def _blocks(event: BlockStored, level: int) -> list[pb.KvBlock]:
    size = event.block_size
    tokens = event.token_ids if is_dense(event) else ()
    keys = event.extra_keys or ()
    blocks = []
    for index, block_hash in enumerate(event.block_hashes):
        block = pb.KvBlock(
            block_hash=signed_hash(block_hash),
            token_ids=tokens[index * size : (index + 1) * size],
            block_size=size,
            lora_id=event.lora_id,
            cache_level=level,
        )
        if index < len(keys) and keys[index]:
            block.extra_keys.extend(_extra_key(key) for key in keys[index] or ())
        blocks.append(block)
    return blocks


def _removed(event: BlockRemoved) -> pb.KvBlocksRemoved:
    tier = _tier(event.medium)
    return pb.KvBlocksRemoved(
        block_hashes=[signed_hash(block_hash) for block_hash in event.block_hashes],
        cache_level=_LEVELS[tier],
        tier=tier,
        medium=event.medium,
        group_idx=event.group_idx,
        locality=_LOCALITIES.get((event.locality or "").upper()),
        ownership=event.ownership,
    )


def _tier(medium: str | None) -> pb.KvCacheTier:
    return _TIERS.get(medium.upper() if medium else None, pb.KV_CACHE_TIER_EXTERNAL)


def _cache_salt(event: BlockStored) -> str | None:
    """Only a chain's first block carries the salt; what follows it is under that parent."""
    if event.parent_block_hash is not None or not event.extra_keys:
        return None
    keys = event.extra_keys[0]
    position = salt_position(keys, event.lora_name)
    return None if keys is None or position is None else str(keys[position])


def _extra_key(key: Any) -> pb.KvBlockExtraKey:
    match key:
        case str():
            return pb.KvBlockExtraKey(text=key)
        case bytes():
            return pb.KvBlockExtraKey(blob=key)
        case bool():
            pass
        case int():
            return pb.KvBlockExtraKey(number=key)
        case [str(identifier), int(offset)]:
            return pb.KvBlockExtraKey(multimodal=pb.KvMultimodalKey(identifier=identifier, offset=offset))
    # Another engine's key of a kind the stream has no field for: any text that differs when it does.
    return pb.KvBlockExtraKey(text=msgspec.json.encode(key, enc_hook=str).decode())
