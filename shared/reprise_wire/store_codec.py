"""The store's gRPC messages <-> plain values."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from reprise.v1 import store_service_pb2 as pb
from reprise_core.errors import DataLoss, InvalidInput
from reprise_core.ids import BlockHash
from reprise_wire.block_transfer import Keyspace


class StoreTier(StrEnum):
    """Where a block was found; the words are those of the metrics."""

    HOST = "host"
    DISK = "disk"
    EXTERNAL = "external"


@dataclass(frozen=True, slots=True)
class StoreLookup:
    generation: int
    """Loads of these blocks, and saves that follow, name it; it is true also when nothing was found."""
    tiers: tuple[StoreTier, ...]
    """One per block found, from the front; its length is the number of blocks that can be loaded."""


@dataclass(frozen=True, slots=True)
class TierChange:
    """A block that came into a tier, or left it: whole, with every rank's part."""

    tier: StoreTier
    group_id: int
    block_hash: BlockHash
    present: bool


@dataclass(frozen=True, slots=True)
class TierUpdate:
    changes: tuple[TierChange, ...]
    start: bool = False
    """Everything said before is void; what there is now follows, in this update and the next ones."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    host_bytes: int
    host_capacity_bytes: int
    host_blocks: int
    redis_connected: bool
    loads: int
    """Blocks asked for."""
    saves: int
    """Blocks offered."""
    dropped_saves: int
    """Blocks that never reached Redis."""
    disk_bytes: int = 0
    disk_capacity_bytes: int = 0
    disk_blocks: int = 0


_TO_PROTO = {
    StoreTier.HOST: pb.TIER_HOST,
    StoreTier.DISK: pb.TIER_DISK,
    StoreTier.EXTERNAL: pb.TIER_EXTERNAL,
}
_FROM_PROTO = {number: tier for tier, number in _TO_PROTO.items()}
LOCAL_TIERS = frozenset({StoreTier.HOST, StoreTier.DISK})


def tiers_to_proto(tiers: Iterable[StoreTier]) -> list[pb.Tier]:
    return [_TO_PROTO[tier] for tier in tiers]


def keyspace_to_proto(keyspace: Keyspace) -> pb.Keyspace:
    return pb.Keyspace(
        namespace=keyspace.namespace,
        fingerprint=keyspace.fingerprint,
        adapter=keyspace.adapter,
        tp_size=keyspace.tp_size,
    )


def keyspace_from_proto(message: pb.Keyspace) -> Keyspace:
    return Keyspace(message.namespace, message.fingerprint, message.adapter, message.tp_size)


def lookup_to_proto(lookup: StoreLookup) -> pb.LookupBlocksResponse:
    return pb.LookupBlocksResponse(tiers=tiers_to_proto(lookup.tiers), generation=lookup.generation)


def lookup_from_proto(message: pb.LookupBlocksResponse) -> StoreLookup:
    try:
        tiers = tuple(_FROM_PROTO[number] for number in message.tiers)
    except KeyError as error:
        raise DataLoss(f"look-up answer has unknown tier {error}") from error
    return StoreLookup(generation=message.generation, tiers=tiers)


def local_tiers_from_proto(tiers: Iterable[int]) -> frozenset[StoreTier]:
    """Tiers to evict from; none named = both. Raises InvalidInput for one that is not of this machine."""
    named = list(tiers)
    found = frozenset(tier for tier in LOCAL_TIERS if _TO_PROTO[tier] in named)
    if len(found) < len(set(named)):
        raise InvalidInput("tiers", f"{named}, must be TIER_HOST and TIER_DISK; Redis evicts by itself")
    return found or LOCAL_TIERS


def tier_update_to_proto(update: TierUpdate) -> pb.WatchTiersResponse:
    """Runs of changes of one kind share a message."""
    message = pb.WatchTiersResponse(start=update.start)
    for (tier, group_id, present), run in groupby(
        update.changes, key=lambda change: (change.tier, change.group_id, change.present)
    ):
        message.changes.add(
            tier=_TO_PROTO[tier],
            group_id=group_id,
            present=present,
            block_hashes=[change.block_hash for change in run],
        )
    return message


def tier_update_from_proto(message: pb.WatchTiersResponse) -> TierUpdate:
    try:
        changes = tuple(
            TierChange(_FROM_PROTO[run.tier], run.group_id, BlockHash(digest), run.present)
            for run in message.changes
            for digest in run.block_hashes
        )
    except KeyError as error:
        raise DataLoss(f"tier changes name unknown tier {error}") from error
    return TierUpdate(changes, start=message.start)


def stats_to_proto(stats: StoreStats) -> pb.GetStatsResponse:
    return pb.GetStatsResponse(
        host_bytes=stats.host_bytes,
        host_capacity_bytes=stats.host_capacity_bytes,
        host_blocks=stats.host_blocks,
        redis_connected=stats.redis_connected,
        loads=stats.loads,
        saves=stats.saves,
        dropped_saves=stats.dropped_saves,
        disk_bytes=stats.disk_bytes,
        disk_capacity_bytes=stats.disk_capacity_bytes,
        disk_blocks=stats.disk_blocks,
    )


def stats_from_proto(message: pb.GetStatsResponse) -> StoreStats:
    return StoreStats(
        host_bytes=message.host_bytes,
        host_capacity_bytes=message.host_capacity_bytes,
        host_blocks=message.host_blocks,
        redis_connected=message.redis_connected,
        loads=message.loads,
        saves=message.saves,
        dropped_saves=message.dropped_saves,
        disk_bytes=message.disk_bytes,
        disk_capacity_bytes=message.disk_capacity_bytes,
        disk_blocks=message.disk_blocks,
    )
