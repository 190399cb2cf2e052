"""The gRPC side: decode, call, encode."""

from collections.abc import AsyncIterator, Sequence
from time import monotonic

import msgspec

from reprise.v1 import store_service_pb2 as pb
from reprise.v1.store_service_pb2_grpc import StoreServiceServicer
from reprise_core.errors import InvalidInput
from reprise_core.ids import BlockHash
from reprise_store.keys import check_hashes, check_keyspace
from reprise_store.metrics import StoreMetrics
from reprise_store.tier_changes import TierChanges
from reprise_store.tiered_store import TieredStore
from reprise_wire.block_transfer import Keyspace
from reprise_wire.store_codec import (
    keyspace_from_proto,
    local_tiers_from_proto,
    lookup_to_proto,
    stats_to_proto,
    tier_update_to_proto,
)

SERVICE_NAME = "reprise.v1.StoreService"
MAX_GROUPS = 64


class StoreServicer(StoreServiceServicer):
    def __init__(
        self, store: TieredStore, changes: TierChanges, *, max_lookup_blocks: int, metrics: StoreMetrics
    ) -> None:
        self._store = store
        self._changes = changes
        self._max_lookup_blocks = max_lookup_blocks
        self._metrics = metrics

    async def LookupBlocks(self, request: pb.LookupBlocksRequest, context: object) -> pb.LookupBlocksResponse:
        started_s = monotonic()
        keyspace = _checked_keyspace(request.keyspace)
        self._check_lookup(request)
        lookup = await self._store.lookup(
            keyspace, tuple(request.group_ids), tuple(BlockHash(digest) for digest in request.block_hashes)
        )
        self._metrics.lookup_seconds.observe(monotonic() - started_s)
        return lookup_to_proto(lookup)

    async def Reset(self, request: pb.ResetRequest, context: object) -> pb.ResetResponse:
        generation = await self._store.reset(_checked_keyspace(request.keyspace))
        return pb.ResetResponse(generation=generation)

    async def Evict(self, request: pb.EvictRequest, context: object) -> pb.EvictResponse:
        keyspace = _checked_keyspace(request.keyspace)
        self._check_hashes(request.block_hashes)
        num_blocks = self._store.evict(
            keyspace,
            frozenset(BlockHash(digest) for digest in request.block_hashes),
            local_tiers_from_proto(request.tiers),
        )
        return pb.EvictResponse(num_blocks=num_blocks)

    async def GetStats(self, request: pb.GetStatsRequest, context: object) -> pb.GetStatsResponse:
        return stats_to_proto(self._store.stats())

    async def WatchTiers(
        self, request: pb.WatchTiersRequest, context: object
    ) -> AsyncIterator[pb.WatchTiersResponse]:
        keyspace = _checked_keyspace(request.keyspace)
        of_adapters = [msgspec.structs.replace(keyspace, adapter=digest) for digest in request.adapters]
        for one in of_adapters:
            check_keyspace(one)
        watch = self._changes.watch(keyspace, *of_adapters)
        self._metrics.tier_watchers.set(self._changes.num_watchers)
        try:
            async for update in watch.updates():
                yield tier_update_to_proto(update)
        finally:
            watch.close()
            self._metrics.tier_watchers.set(self._changes.num_watchers)

    def _check_lookup(self, request: pb.LookupBlocksRequest) -> None:
        if not 1 <= len(request.group_ids) <= MAX_GROUPS:
            raise InvalidInput("group_ids", f"{len(request.group_ids)} groups, must be 1 to {MAX_GROUPS}")
        self._check_hashes(request.block_hashes)

    def _check_hashes(self, block_hashes: Sequence[bytes]) -> None:
        if len(block_hashes) > self._max_lookup_blocks:
            raise InvalidInput(
                "block_hashes", f"{len(block_hashes)} hashes, at most {self._max_lookup_blocks}"
            )
        check_hashes("block_hashes[{}]", block_hashes)


def _checked_keyspace(message: pb.Keyspace) -> Keyspace:
    keyspace = keyspace_from_proto(message)
    check_keyspace(keyspace)
    return keyspace
