"""The gRPC side: decode, call, encode."""

from time import monotonic

from reprise.v1 import store_service_pb2 as pb
from reprise.v1.store_service_pb2_grpc import StoreServiceServicer
from reprise_core.errors import InvalidInput
from reprise_core.ids import BlockHash
from reprise_store.keys import check_hash, check_keyspace
from reprise_store.metrics import StoreMetrics
from reprise_store.tiered_store import TieredStore
from reprise_wire.block_transfer import Keyspace
from reprise_wire.store_codec import keyspace_from_proto, lookup_to_proto, stats_to_proto

SERVICE_NAME = "reprise.v1.StoreService"
MAX_GROUPS = 64


class StoreServicer(StoreServiceServicer):
    def __init__(self, store: TieredStore, *, max_lookup_blocks: int, metrics: StoreMetrics) -> None:
        self._store = store
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

    async def GetStats(self, request: pb.GetStatsRequest, context: object) -> pb.GetStatsResponse:
        return stats_to_proto(self._store.stats())

    def _check_lookup(self, request: pb.LookupBlocksRequest) -> None:
        if not 1 <= len(request.group_ids) <= MAX_GROUPS:
            raise InvalidInput("group_ids", f"{len(request.group_ids)} groups, must be 1 to {MAX_GROUPS}")
        if len(request.block_hashes) > self._max_lookup_blocks:
            raise InvalidInput(
                "block_hashes", f"{len(request.block_hashes)} hashes, at most {self._max_lookup_blocks}"
            )
        for index, digest in enumerate(request.block_hashes):
            check_hash(f"block_hashes[{index}]", digest)


def _checked_keyspace(message: pb.Keyspace) -> Keyspace:
    keyspace = keyspace_from_proto(message)
    check_keyspace(keyspace)
    return keyspace
