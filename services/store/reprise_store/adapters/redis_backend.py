"""Blocks in Redis or Valkey: pipelines in bounded chunks, one atomic value per block.

The generation of a scope is the number under `<namespace>:generation:<fingerprint>`. It starts at a
large random number rather than 0, so that one that was evicted or lost with the server can never come
back to an earlier value and revive blocks from before a reset.

It is read after the blocks. On one server each chunk reads it behind its values, in the same pipeline:
when all chunks saw one number, the last of them saw it after every value. In a cluster it lives on one node
and the blocks on others, so it is read in a round trip of its own once every node has answered.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from reprise_store.adapters.redis_calls import KeyedCall, Part, RedisCalls, Split
from reprise_store.adapters.redis_connections import Connector, RedisSecurity
from reprise_store.adapters.redis_node import Command
from reprise_store.adapters.redis_topology import make_topology
from reprise_store.adapters.resp_parser import Allocate
from reprise_store.breaker import CircuitBreaker
from reprise_store.keys import Scope
from reprise_store.ports import BackendDown, BackendPartlyDown, Presence, Value, Values
from reprise_store.redis_address import parse_redis_url

FIRST_GUESS_BYTES = 1024 * 1024
"""Length of a value before any was seen."""
SCAN_COUNT = 500
"""Keys looked at per SCAN call, and at most deleted per UNLINK: well under a millisecond of Redis' time."""
SWEEP_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True)
class RedisLimits:
    timeout_s: float
    connections: int
    """Calls at the same time, each with a connection of its own."""
    chunk_bytes: int
    chunk_keys: int
    max_value_bytes: int
    """Longer values count as missing."""
    ttl_s: float
    """0 = no expiry."""


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    node: str
    max_bytes: int
    """0 = unlimited."""
    policy: str

    def advice(self, *, blocks_expire: bool) -> str:
        """What to change, or nothing. The volatile- policies evict what expires alone: blocks, if they do,
        and never a generation, whose loss makes every block of its model useless."""
        if not self.max_bytes or (blocks_expire and self.policy.startswith("volatile-")):
            return ""
        wanted = "volatile-lru" if blocks_expire else "volatile-lru and REPRISE_STORE_BLOCK_TTL_S above 0"
        problem = "saves fail"
        if self.policy.startswith("allkeys-"):
            problem = "it may evict the number of a model's generation, and all its blocks are lost"
        return (
            f"maxmemory-policy is {self.policy!r} and maxmemory is set: when Redis is full, {problem}. "
            f"Set maxmemory-policy to {wanted}"
        )


def generation_key(scope: Scope) -> bytes:
    return f"{scope.namespace}:generation:{scope.fingerprint}".encode()


class RedisBackend:
    """A call waits at most `timeout_s` per chunk for a connection and as long for the answer.

    In a cluster a node that is away costs what lives there: those keys are missing, the others are served.
    Where the generation's own node is away, generations are None. BackendDown means that nobody answers.
    """

    def __init__(
        self,
        url: str,
        limits: RedisLimits,
        *,
        make_breaker: Callable[[], CircuitBreaker],
        security: RedisSecurity = RedisSecurity(),  # noqa: B008 (frozen)
        allocate: Allocate = lambda nbytes: None,
    ) -> None:
        """`allocate` gives the memory that values are received into, else they get some of their own.
        `make_breaker`: one for each node of a cluster. Raises ValueError for a bad URL."""
        self._limits = limits
        address = parse_redis_url(url)
        connector = Connector(
            address,
            security,
            timeout_s=limits.timeout_s,
            allocate=allocate,
            max_bulk_bytes=limits.max_value_bytes,
        )
        threads = ThreadPoolExecutor(limits.connections, thread_name_prefix="redis")
        self._calls = RedisCalls(
            make_topology(address, connector, threads, make_breaker),
            threads,
            connections=limits.connections,
            timeout_s=limits.timeout_s,
        )
        self._value_nbytes = FIRST_GUESS_BYTES
        """Length of the last value read or written: how many fit into a chunk."""

    async def close(self) -> None:
        await self._calls.close()

    async def probe(self) -> None:
        """Raises BackendDown or BackendBusy when nobody answers."""
        await self._calls.probe()

    async def memory_policies(self) -> list[MemoryPolicy]:
        policies = []
        for node in await self._calls.primaries():
            (info,) = await self._calls.ask(node, [(b"INFO", b"memory")])
            facts = dict(line.split(":", 1) for line in bytes(info).decode().splitlines() if ":" in line)
            policies.append(
                MemoryPolicy(node.name, int(facts.get("maxmemory", 0)), facts.get("maxmemory_policy", ""))
            )
        return policies

    async def exists(self, scope: Scope, keys: Sequence[str]) -> Presence:
        def split(places: Part) -> Iterator[Part]:
            return _by_count(places, self._limits.chunk_keys)

        names = [key.encode() for key in keys]
        call = KeyedCall(names, [(b"EXISTS", name) for name in names])
        generation = await self._each(scope, call, split)
        return Presence([answer == 1 for answer in call.answers], generation)

    async def get(self, scope: Scope, keys: Sequence[str]) -> Values:
        def split(places: Part) -> Iterator[Part]:
            per_chunk = min(self._limits.chunk_keys, self._limits.chunk_bytes // self._value_nbytes)
            return _by_count(places, max(1, per_chunk))

        names = [key.encode() for key in keys]
        if self._ttl_ms:
            commands: list[Command] = [(b"GETEX", name, b"PX", b"%d" % self._ttl_ms) for name in names]
        else:
            commands = [(b"GET", name) for name in names]
        call = KeyedCall(names, commands, value_nbytes=self._value_nbytes)
        generation = await self._each(scope, call, split)
        # An empty value is no block; the wire says "none" with an empty frame.
        values = [answer or None for answer in call.answers]
        self._value_nbytes = next((len(value) for value in values if value), self._value_nbytes)
        return Values(values, generation)

    async def put(self, scope: Scope, items: Sequence[tuple[str, Value]]) -> list[bool | None]:
        def split(places: Part) -> Iterator[Part]:
            return by_bytes(places, sizes, self._limits.chunk_bytes, self._limits.chunk_keys)

        sizes = [len(value) for _, value in items]
        self._value_nbytes = max(1, sizes[-1]) if sizes else self._value_nbytes
        expiry = (b"PX", b"%d" % self._ttl_ms) if self._ttl_ms else ()
        names = [key.encode() for key, _ in items]
        commands = [(b"SET", name, value, *expiry) for name, (_, value) in zip(names, items, strict=True)]
        call = KeyedCall(names, commands, value_nbytes=self._value_nbytes)
        generation = await self._each(scope, call, split)
        taken = [answer == b"OK" for answer in call.answers]
        if generation is not None:
            await self._take_back(
                scope, generation, [name for name, one in zip(names, taken, strict=True) if one]
            )
        return [None if answer is None else one for answer, one in zip(call.answers, taken, strict=True)]

    async def ensure_generation(self, scope: Scope, proposal: int) -> int:
        key = generation_key(scope)
        return await self._on_generation(scope, (b"SET", key, b"%d" % proposal, b"NX"), (b"GET", key))

    async def advance_generation(self, scope: Scope, proposal: int) -> int:
        key = generation_key(scope)
        return await self._on_generation(scope, (b"SET", key, b"%d" % proposal, b"NX"), (b"INCR", key))

    async def delete_stale(self, scope: Scope, generation: int) -> int:
        pattern = f"{scope.namespace}:*:{scope.fingerprint}:*".encode()
        keep = f"{scope.namespace}:{generation}:".encode()
        num_deleted = 0
        for node in await self._calls.primaries():
            cursor = b"0"
            while True:
                scan = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % SCAN_COUNT)
                ((cursor, found),) = await self._calls.ask(node, [scan])
                stale = [key for key in found if not key.startswith(keep)]
                if stale:
                    deleted = await self._calls.ask(node, [(b"UNLINK", key) for key in stale])
                    num_deleted += sum(answer for answer in deleted if isinstance(answer, int))
                if cursor == b"0":
                    break
                await asyncio.sleep(SWEEP_PAUSE_S)
        return num_deleted

    async def _take_back(self, scope: Scope, generation: int, written: Sequence[bytes]) -> None:
        """Deletes what was written for a generation that was over by then. A value written before a reset is
        found by the sweep after it; of one written later only the writer knows."""
        now = f"{scope.namespace}:{generation}:".encode()
        stale = [name for name in written if not name.startswith(now)]
        if stale:
            call = KeyedCall(stale, [(b"UNLINK", name) for name in stale])
            await self._calls.run(call, lambda places: _by_count(places, self._limits.chunk_keys))

    @property
    def _ttl_ms(self) -> int:
        return int(self._limits.ttl_s * 1000)

    async def _each(self, scope: Scope, call: KeyedCall, split: Split) -> int | None:
        """Runs the call; the generation after it."""
        if not self._calls.sharded:
            call.along = (b"GET", generation_key(scope))
        await self._calls.run(call, split)
        seen = set(call.along_answers)
        raw = seen.pop() if len(seen) == 1 else await self._read_generation(scope)
        return None if raw is None else _number(raw)

    async def _read_generation(self, scope: Scope) -> bytes | None:
        """None also where its node is away: then the last known one holds, as for all that is away."""
        try:
            raw: bytes | None = await self._calls.at_key(
                generation_key(scope), [(b"GET", generation_key(scope))]
            )
        except BackendPartlyDown:
            return None
        return raw

    async def _on_generation(self, scope: Scope, *commands: Command) -> int:
        transaction = [(b"MULTI",), *commands, (b"EXEC",)]
        answers = await self._calls.at_key(generation_key(scope), transaction)
        return _number(answers[-1])


def by_bytes(places: Part, sizes: Sequence[int], max_bytes: int, max_places: int) -> Iterator[Part]:
    """At least one place each, and no more than `max_bytes` unless one alone is longer."""
    start, num_bytes = 0, 0
    for index, place in enumerate(places):
        full = num_bytes + sizes[place] > max_bytes or index - start >= max_places
        if index > start and full:
            yield places[start:index]
            start, num_bytes = index, 0
        num_bytes += sizes[place]
    if start < len(places):
        yield places[start:]


def _by_count(places: Part, size: int) -> Iterator[Part]:
    return (places[start : start + size] for start in range(0, len(places), size))


def _number(raw: object) -> int:
    try:
        return int(raw)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        raise BackendDown(f"redis: a generation must be a number, not {raw!r:.80}") from None
