"""A backend whose values are compressed on their way in and expanded on their way out, in threads."""

import asyncio
from collections.abc import Callable, Sequence

from reprise_store.keys import Scope
from reprise_store.metrics import StoreMetrics
from reprise_store.ports import Backend, Presence, Value, Values
from reprise_store.value_codec import BadValue, Codec, compress, expand, is_compressed


class CompressedBackend:
    """A value that cannot be expanded counts as missing."""

    def __init__(
        self,
        backend: Backend,
        codec: Codec,
        *,
        max_value_bytes: int,
        allocate: Callable[[int], memoryview | None],
        metrics: StoreMetrics,
    ) -> None:
        self._backend = backend
        self._codec = codec
        self._max_value_bytes = max_value_bytes
        self._allocate = allocate
        self._metrics = metrics

    async def exists(self, scope: Scope, keys: Sequence[str]) -> Presence:
        return await self._backend.exists(scope, keys)

    async def get(self, scope: Scope, keys: Sequence[str]) -> Values:
        got = await self._backend.get(scope, keys)
        if not any(value is not None and is_compressed(value) for value in got.values):
            return got
        return Values(await asyncio.to_thread(self._expand_all, got.values), got.generation)

    async def put(self, scope: Scope, items: Sequence[tuple[str, Value]]) -> Sequence[bool | None]:
        if self._codec is not Codec.NONE:
            items = await asyncio.to_thread(self._compress_all, items)
        return await self._backend.put(scope, items)

    async def ensure_generation(self, scope: Scope, proposal: int) -> int:
        return await self._backend.ensure_generation(scope, proposal)

    async def advance_generation(self, scope: Scope, proposal: int) -> int:
        return await self._backend.advance_generation(scope, proposal)

    async def delete_stale(self, scope: Scope, generation: int) -> int:
        return await self._backend.delete_stale(scope, generation)

    def _compress_all(self, items: Sequence[tuple[str, Value]]) -> list[tuple[str, Value]]:
        packed = [(key, compress(value, self._codec)) for key, value in items]
        self._metrics.codec_bytes.labels("plain").inc(sum(len(value) for _, value in items))
        self._metrics.codec_bytes.labels("stored").inc(sum(len(value) for _, value in packed))
        return packed

    def _expand_all(self, values: Sequence[Value | None]) -> list[Value | None]:
        return [None if value is None else self._expand(value) for value in values]

    def _expand(self, value: Value) -> Value | None:
        try:
            return expand(value, max_bytes=self._max_value_bytes, allocate=self._allocate)
        except BadValue as error:
            self._metrics.values_refused.labels(error.reason).inc()
            return None
