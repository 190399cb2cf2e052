"""The scheduler's way to the store's control side: look-up, reset, stats.

Every failure is a `PeerError` with its kind: UNAVAILABLE and DEADLINE mean "go on without the store".
Calls fail at once while the store is away; the channel reconnects by itself.
"""

from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from typing import TypeVar

import grpc

from reprise.v1 import store_service_pb2 as pb
from reprise.v1.store_service_pb2_grpc import StoreServiceStub
from reprise_core.ids import BlockHash
from reprise_wire.block_transfer import Keyspace
from reprise_wire.error_codec import from_rpc_error
from reprise_wire.store_codec import (
    StoreLookup,
    StoreStats,
    StoreTier,
    TierUpdate,
    keyspace_to_proto,
    lookup_from_proto,
    stats_from_proto,
    tier_update_from_proto,
    tiers_to_proto,
)

T = TypeVar("T")


class StoreClient:
    """`channel` is the caller's (`reprise_runtime.grpc_server.channel`), who also closes it."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        lookup_timeout_s: float = 2.0,
        reset_timeout_s: float = 5.0,
        peer: str = "store",
    ) -> None:
        self._stub = StoreServiceStub(channel)  # type: ignore[no-untyped-call]
        self._lookup_timeout_s = lookup_timeout_s
        self._reset_timeout_s = reset_timeout_s
        self._peer = peer

    async def lookup(
        self, keyspace: Keyspace, group_ids: Sequence[int], block_hashes: Sequence[BlockHash]
    ) -> StoreLookup:
        """How many blocks from the front can be loaded. With no hashes it only tells the generation."""
        request = pb.LookupBlocksRequest(
            keyspace=keyspace_to_proto(keyspace), group_ids=group_ids, block_hashes=block_hashes
        )
        return lookup_from_proto(
            await self._call(self._stub.LookupBlocks(request, timeout=self._lookup_timeout_s))
        )

    async def reset(self, keyspace: Keyspace) -> int:
        """The new generation; from then on no block of the model is found in any tier of any store."""
        request = pb.ResetRequest(keyspace=keyspace_to_proto(keyspace))
        response: pb.ResetResponse = await self._call(
            self._stub.Reset(request, timeout=self._reset_timeout_s)
        )
        return response.generation

    async def evict(
        self, keyspace: Keyspace, block_hashes: Sequence[BlockHash] = (), tiers: Iterable[StoreTier] = ()
    ) -> int:
        """Frees the store's copies in host memory and on disk (or one of them), of all blocks if none is
        named; how many went. Redis keeps its own."""
        request = pb.EvictRequest(
            keyspace=keyspace_to_proto(keyspace), block_hashes=block_hashes, tiers=tiers_to_proto(tiers)
        )
        response: pb.EvictResponse = await self._call(
            self._stub.Evict(request, timeout=self._reset_timeout_s)
        )
        return response.num_blocks

    async def watch_tiers(
        self, keyspace: Keyspace, adapters: Sequence[str] = ()
    ) -> AsyncIterator[TierUpdate]:
        """What the tiers have of the keyspace and of these adapters beside it, and every change, until the
        store ends it or is lost (PeerError)."""
        request = pb.WatchTiersRequest(keyspace=keyspace_to_proto(keyspace), adapters=adapters)
        call = self._stub.WatchTiers(request)
        try:
            async for message in call:
                yield tier_update_from_proto(message)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._peer) from error
        finally:
            call.cancel()

    async def stats(self) -> StoreStats:
        return stats_from_proto(
            await self._call(self._stub.GetStats(pb.GetStatsRequest(), timeout=self._lookup_timeout_s))
        )

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._peer) from error
