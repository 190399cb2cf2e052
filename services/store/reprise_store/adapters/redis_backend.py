"""Blocks in Redis or Valkey: pooled connections, pipelines in bounded chunks, one atomic value per block.

The generation of a scope is the number under `<namespace>:generation:<fingerprint>`. It starts at a
large random number rather than 0, so that one that was evicted or lost with the server can never come
back to an earlier value and revive blocks from before a reset.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import redis.asyncio as aioredis
from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from reprise_store.keys import Scope
from reprise_store.ports import BackendBusy, BackendDown, Presence, Value, Values

READ_SIZE_BYTES = 1024 * 1024
FIRST_GUESS_BYTES = 1024 * 1024
"""Length of a value before any was seen."""
SCAN_COUNT = 500
"""Keys looked at per SCAN call, and at most deleted per UNLINK: well under a millisecond of Redis' time."""
SWEEP_PAUSE_S = 0.005
_SPELLINGS = {"valkey": "redis", "valkeys": "rediss", "valkey+unix": "unix"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RedisLimits:
    timeout_s: float
    connections: int
    chunk_bytes: int
    chunk_keys: int
    ttl_s: float
    """0 = no expiry."""


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    max_bytes: int
    """0 = unlimited."""
    policy: str

    @property
    def advice(self) -> str:
        """What to change, or nothing."""
        if self.max_bytes and not self.policy.startswith("allkeys-"):
            return (
                f"maxmemory-policy is {self.policy!r} and maxmemory is set: when Redis is full, saves fail. "
                "Set maxmemory-policy to allkeys-lru (or another allkeys- policy)"
            )
        return ""


def generation_key(scope: Scope) -> str:
    return f"{scope.namespace}:generation:{scope.fingerprint}"


class RedisBackend:
    """A call waits at most `timeout_s` per chunk for a connection and for the answer together."""

    def __init__(self, url: str, limits: RedisLimits) -> None:
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.connections)
        self._value_nbytes = FIRST_GUESS_BYTES
        """Length of the last value read or written: how many fit into a chunk."""
        self._client = aioredis.Redis.from_pool(_make_pool(url, limits))

    async def close(self) -> None:
        await self._client.aclose()

    async def forget_connections(self) -> None:
        """Drops idle connections, so that the first calls after an outage do not meet dead ones."""
        await self._client.connection_pool.disconnect(inuse_connections=False)

    async def ping(self) -> None:
        await self._call(self._client.ping)

    async def memory_policy(self) -> MemoryPolicy:
        async def read() -> dict[str, Any]:
            info: dict[str, Any] = await self._client.info("memory")
            return info

        info = await self._call(read)
        return MemoryPolicy(int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", "")))

    async def exists(self, scope: Scope, keys: Sequence[str]) -> Presence:
        found: list[bool] = []
        generation: int | None = None
        for chunk in _chunks(keys, self._limits.chunk_keys) or [()]:
            flags, generation = await self._exists_chunk(scope, chunk)
            found += flags
        return Presence(found, generation)

    async def get(self, scope: Scope, keys: Sequence[str]) -> Values:
        values: list[Value | None] = []
        generation: int | None = None
        start = 0
        while start < len(keys) or not start:
            stop = start + max(1, self._limits.chunk_bytes // self._value_nbytes)
            got, generation = await self._get_chunk(scope, keys[start:stop])
            values += got
            start = stop
        return Values(values, generation)

    async def put(self, scope: Scope, items: Sequence[tuple[str, Value]]) -> list[bool]:
        taken: list[bool] = []
        for chunk in chunks_by_bytes(items, self._limits.chunk_bytes):
            pipe = self._client.pipeline(transaction=False)
            for key, value in chunk:
                pipe.set(key, value, px=self._ttl_ms)
                self._value_nbytes = max(1, len(value))
            taken += [answer is not None for answer in await self._execute(pipe, tolerate_no_room=True)]
        return taken

    async def ensure_generation(self, scope: Scope, proposal: int) -> int:
        pipe = self._client.pipeline(transaction=True)
        pipe.set(generation_key(scope), proposal, nx=True)
        pipe.get(generation_key(scope))
        _, raw = await self._execute(pipe)
        return int(raw)

    async def advance_generation(self, scope: Scope, proposal: int) -> int:
        pipe = self._client.pipeline(transaction=True)
        pipe.set(generation_key(scope), proposal, nx=True)
        pipe.incr(generation_key(scope))
        _, generation = await self._execute(pipe)
        return int(generation)

    async def delete_stale(self, scope: Scope, generation: int) -> int:
        pattern = f"{scope.namespace}:*:{scope.fingerprint}:*"
        keep = f"{scope.namespace}:{generation}:".encode()
        cursor, num_deleted = 0, 0
        while True:
            cursor, keys = await self._call(partial(self._scan, cursor, pattern))
            stale = [key for key in keys if not key.startswith(keep)]
            if stale:
                num_deleted += await self._call(partial(self._client.unlink, *stale))
            if cursor == 0:
                return num_deleted
            await asyncio.sleep(SWEEP_PAUSE_S)

    async def _scan(self, cursor: int, pattern: str) -> tuple[int, list[bytes]]:
        answer: Any = await self._client.scan(cursor, match=pattern, count=SCAN_COUNT)
        return int(answer[0]), list(answer[1])

    @property
    def _ttl_ms(self) -> int | None:
        return int(self._limits.ttl_s * 1000) or None

    async def _exists_chunk(self, scope: Scope, keys: Sequence[str]) -> tuple[list[bool], int | None]:
        """Mostly all or none are there, which one counting command tells; else one command per key."""
        pipe = self._client.pipeline(transaction=False)
        if keys:
            pipe.execute_command("EXISTS", *keys)
        pipe.get(generation_key(scope))
        *counted, raw = await self._execute(pipe)
        num_found = counted[0] if keys else 0
        if num_found in (0, len(keys)):
            return [num_found > 0] * len(keys), _to_int(raw)
        for key in keys:
            pipe.execute_command("EXISTS", key)
        pipe.get(generation_key(scope))
        *flags, raw = await self._execute(pipe)
        return [bool(flag) for flag in flags], _to_int(raw)

    async def _get_chunk(self, scope: Scope, keys: Sequence[str]) -> tuple[list[Value | None], int | None]:
        pipe = self._client.pipeline(transaction=False)
        if self._ttl_ms is not None:
            for key in keys:
                pipe.getex(key, px=self._ttl_ms)
        elif keys:
            pipe.mget(keys)
        pipe.get(generation_key(scope))
        *answers, raw = await self._execute(pipe)
        values = answers if self._ttl_ms is not None or not keys else answers[0]
        for value in values:
            if value:
                self._value_nbytes = len(value)
        # An empty value is no block; the wire says "none" with an empty frame.
        return [value or None for value in values], _to_int(raw)

    async def _execute(self, pipe: Any, *, tolerate_no_room: bool = False) -> list[Any]:
        answers: list[Any] = await self._call(lambda: pipe.execute(raise_on_error=False))
        for index, answer in enumerate(answers):
            if tolerate_no_room and _is_no_room(answer):
                answers[index] = None
            elif isinstance(answer, Exception):
                raise BackendDown(f"redis: {_reason(answer)}") from answer
        return answers

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await self._slots.acquire()
        except TimeoutError as error:
            raise BackendBusy(f"redis: all {self._limits.connections} connections are in use") from error
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await call()
        except TimeoutError as error:
            raise BackendDown(f"redis: no answer within {self._limits.timeout_s} s") from error
        except (RedisError, OSError) as error:
            raise BackendDown(f"redis: {_reason(error)}") from error
        finally:
            self._slots.release()


def chunks_by_bytes(
    items: Sequence[tuple[str, Value]], chunk_bytes: int
) -> Iterator[Sequence[tuple[str, Value]]]:
    """At least one item each, and no more than `chunk_bytes` unless one item alone is longer."""
    start, num_bytes = 0, 0
    for index, (_, value) in enumerate(items):
        if index > start and num_bytes + len(value) > chunk_bytes:
            yield items[start:index]
            start, num_bytes = index, 0
        num_bytes += len(value)
    if start < len(items):
        yield items[start:]


def _make_pool(url: str, limits: RedisLimits) -> ConnectionPool:
    scheme, _, rest = url.partition("://")
    return ConnectionPool.from_url(
        f"{_SPELLINGS.get(scheme, scheme)}://{rest}",
        # Slots, not the pool, hold callers back: a full pool would look like an outage.
        max_connections=2 * limits.connections,
        socket_timeout=limits.timeout_s,
        socket_connect_timeout=limits.timeout_s,
        socket_read_size=READ_SIZE_BYTES,
        retry=Retry(NoBackoff(), 0),
        client_name="reprise-store",
    )


def _chunks(keys: Sequence[str], size: int) -> list[Sequence[str]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]


def _is_no_room(answer: object) -> bool:
    """Full, a replica, or unable to persist: it serves reads and takes no writes."""
    if isinstance(answer, OutOfMemoryError | ReadOnlyError):
        return True
    return isinstance(answer, ResponseError) and str(answer).startswith("MISCONF")


def _to_int(raw: bytes | None) -> int | None:
    return None if raw is None else int(raw)


def _reason(error: BaseException) -> str:
    """The kind and the server's words, which never hold the password that we sent."""
    if isinstance(error, RedisTimeoutError | RedisConnectionError | ResponseError):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__
