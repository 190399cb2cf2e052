"""The store's control side, for the model of this engine."""

from collections.abc import AsyncIterator, Sequence

from reprise_core.ids import BlockHash
from reprise_runtime.grpc_server import channel
from reprise_runtime.tracing import Tracing
from reprise_wire.block_transfer import Keyspace
from reprise_wire.clients.store import StoreClient
from reprise_wire.store_codec import StoreStats, TierUpdate


class StoreBlocks:
    """Implements `ports.ExternalBlocks` over gRPC."""

    def __init__(self, address: str, *, namespace: str, tracing: Tracing | None = None) -> None:
        self._channel = channel(address, tracing)
        self._client = StoreClient(self._channel, peer=f"store at {address}")
        self._watch_channel = channel(address, own_connection=True)
        self._watcher = StoreClient(self._watch_channel, peer=f"store at {address}")
        self._namespace = namespace

    async def lookup(
        self,
        model_fingerprint: str,
        group_ids: Sequence[int],
        block_hashes: Sequence[BlockHash],
        adapter: str = "",
    ) -> tuple[tuple[str, ...], int]:
        keyspace = self._keyspace(model_fingerprint, adapter)
        found = await self._client.lookup(keyspace, group_ids, block_hashes)
        return tuple(found.tiers), found.generation

    async def stats(self) -> StoreStats:
        return await self._client.stats()

    def watch_tiers(self, model_fingerprint: str, adapters: Sequence[str] = ()) -> AsyncIterator[TierUpdate]:
        return self._watcher.watch_tiers(self._keyspace(model_fingerprint), adapters)

    async def reset(self, model_fingerprint: str) -> int:
        return await self._client.reset(self._keyspace(model_fingerprint))

    def _keyspace(self, model_fingerprint: str, adapter: str = "") -> Keyspace:
        return Keyspace(self._namespace, model_fingerprint, adapter)

    async def close(self) -> None:
        await self._channel.close()
        await self._watch_channel.close()
