"""The store's gRPC messages <-> plain values."""

from dataclasses import dataclass
from enum import StrEnum

from reprise.v1 import store_service_pb2 as pb
from reprise_core.errors import DataLoss
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


_TO_PROTO = {
    StoreTier.HOST: pb.TIER_HOST,
    StoreTier.DISK: pb.TIER_DISK,
    StoreTier.EXTERNAL: pb.TIER_EXTERNAL,
}
_FROM_PROTO = {number: tier for tier, number in _TO_PROTO.items()}


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
    return pb.LookupBlocksResponse(
        tiers=[_TO_PROTO[tier] for tier in lookup.tiers], generation=lookup.generation
    )


def lookup_from_proto(message: pb.LookupBlocksResponse) -> StoreLookup:
    try:
        tiers = tuple(_FROM_PROTO[number] for number in message.tiers)
    except KeyError as error:
        raise DataLoss(f"look-up answer has unknown tier {error}") from error
    return StoreLookup(generation=message.generation, tiers=tiers)


def stats_to_proto(stats: StoreStats) -> pb.GetStatsResponse:
    return pb.GetStatsResponse(
        host_bytes=stats.host_bytes,
        host_capacity_bytes=stats.host_capacity_bytes,
        host_blocks=stats.host_blocks,
        redis_connected=stats.redis_connected,
        loads=stats.loads,
        saves=stats.saves,
        dropped_saves=stats.dropped_saves,
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
    )
