"""Commands to the servers that have their keys: limits, redirections, nodes that are away.

Every call has a connection to itself. In a cluster a node that is away costs what lives there and no time:
it has a breaker of its own. Redirections are followed once, and the slots are read anew in the background
after each, and after each failure.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

from redis.exceptions import (
    AskError,
    ExecAbortError,
    MovedError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from reprise_store.adapters.redis_node import Command, RedisNode
from reprise_store.adapters.redis_topology import ClusterNodes, OneNode
from reprise_store.ports import BackendBusy, BackendDown, BackendPartlyDown

PIPELINES_PER_CALL = 2
"""Chunks of one call in flight per node: Redis has the next one to work on while we read."""
_ASKING: Command = (b"ASKING",)

Part = Sequence[int]
"""Places in a call's keys that travel in one pipeline."""
Split = Callable[[Part], Iterator[Part]]


class KeyedCall:
    """One command per key, and what came back."""

    def __init__(self, keys: Sequence[bytes], commands: Sequence[Command], *, value_nbytes: int = 0) -> None:
        """`value_nbytes`: of one value, sent or received; about."""
        self.keys = keys
        self.commands = commands
        self.value_nbytes = value_nbytes
        self.along: Command | None = None
        """Asked for at the end of each pipeline."""
        self.answers: list[Any] = [None] * len(keys)
        """None also where the node is away; an exception where it refused this command."""
        self.along_answers: list[Any] = []
        self.num_answered = 0
        self.problem: BackendDown | None = None


class RedisCalls:
    """At most `connections` calls at the same time; each waits at most `timeout_s` for its turn and as long
    for the answer."""

    def __init__(
        self, topology: OneNode | ClusterNodes, threads: Executor, *, connections: int, timeout_s: float
    ) -> None:
        """`threads`: where the topology makes connections; closed with this."""
        self._topology = topology
        self._threads = threads
        self._connections = connections
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(connections)
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def sharded(self) -> bool:
        """Keys lie on several servers."""
        return self._topology.sharded

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for node in self._topology.primaries():
            node.forget_connections()

    async def probe(self) -> None:
        """Asks every node; one answer is enough. Raises BackendDown or BackendBusy."""
        if isinstance(self._topology, ClusterNodes):
            await self._learn_slots(self._topology)
        pings = [self._try(node, [(b"PING",)]) for node in self._topology.primaries()]
        outcomes = await asyncio.gather(*pings, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if len(failures) == len(pings):
            raise failures[0]

    async def primaries(self) -> list[RedisNode]:
        await self._know_slots()
        return self._topology.primaries()

    async def run(self, call: KeyedCall, split: Split) -> None:
        """Fills in the call. Raises when nothing was answered; with one server, when anything was not."""
        await self._know_slots()
        if isinstance(self._topology, OneNode):
            await self._run(call, [(self._topology.node, list(split(range(len(call.keys)))))])
        else:
            await self._run_sharded(call, split, self._topology)
        call.answers = [None if isinstance(answer, AskError) else answer for answer in call.answers]
        if call.keys and not call.num_answered:
            raise call.problem or BackendPartlyDown("redis: no node has the slots of these keys")

    async def _run_sharded(self, call: KeyedCall, split: Split, cluster: ClusterNodes) -> None:
        places: dict[RedisNode | None, list[int]] = {}
        for place, key in enumerate(call.keys):
            places.setdefault(cluster.node_of(key), []).append(place)
        await self._run(
            call, [(node, list(split(part))) for node, part in places.items() if node is not None]
        )
        await self._follow(call, split, cluster)

    async def at_key(self, key: bytes, commands: Sequence[Command]) -> Any:
        """The last command's answer from the node that has the key, following one redirection."""
        await self._know_slots()
        node = self._topology.node_of(key)
        if node is None:
            raise BackendPartlyDown("redis: no node has the slot of this key")
        answers = await self.ask(node, commands)
        redirected = next((answer for answer in answers if isinstance(answer, AskError)), None)
        if redirected is not None and isinstance(self._topology, ClusterNodes):
            self._refresh(self._topology)
            node = self._topology.node_at(redirected.host, redirected.port)
            prefix = [] if isinstance(redirected, MovedError) else [_ASKING]  # holds for a transaction
            answers = await self.ask(node, [*prefix, *commands])
        if isinstance(answers[-1], Exception):
            raise BackendDown(f"redis: {reason_of(answers[-1])}")
        return answers[-1]

    async def ask(self, node: RedisNode, commands: Sequence[Command], *, num_bytes: int = 0) -> list[Any]:
        """As `_try`, but a cluster's node that is known to be away fails at once."""
        breaker = node.breaker
        if breaker is not None and not breaker.closed and not breaker.try_probe():
            raise self._partly(f"redis: node {node.name} is left alone until it answers")
        try:
            return await self._try(node, commands, num_bytes)
        except BackendDown as error:
            if breaker is None:
                raise
            raise self._partly(str(error)) from error

    async def _run(
        self, call: KeyedCall, plan: Sequence[tuple[RedisNode, list[Part]]], *, asking: bool = False
    ) -> None:
        """Parts of one node go to whichever worker is free. A node that failed is asked no more; what it
        was not asked is missing, or the call fails when there is but one node."""
        failed: set[RedisNode] = set()

        async def work(node: RedisNode, parts: Iterator[Part]) -> None:
            for part in parts:
                if node in failed:
                    return
                try:
                    await self._run_part(call, node, part, asking=asking)
                except BackendDown as error:
                    failed.add(node)
                    call.problem = error
                    if not self._topology.sharded:
                        raise

        workers = []
        for node, parts in plan:
            shared = iter(parts)
            workers += [work(node, shared) for _ in range(min(PIPELINES_PER_CALL, len(parts)))]
        if len(workers) == 1:
            await workers[0]
            return
        for outcome in await asyncio.gather(*workers, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _run_part(self, call: KeyedCall, node: RedisNode, part: Part, *, asking: bool) -> None:
        commands = [call.commands[place] for place in part]
        if asking:
            commands = [command for one in commands for command in (_ASKING, one)]
        if call.along is not None:
            commands.append(call.along)
        answers = await self.ask(node, commands, num_bytes=len(part) * call.value_nbytes)
        if call.along is not None:
            call.along_answers.append(answers.pop())
        call.num_answered += len(part)
        for place, answer in zip(part, answers[1::2] if asking else answers, strict=True):
            call.answers[place] = answer

    async def _follow(self, call: KeyedCall, split: Split, cluster: ClusterNodes) -> None:
        """Asks once more where the cluster says that a key has moved to."""
        moved: dict[tuple[str, int, bool], list[int]] = {}
        for place, answer in enumerate(call.answers):
            if isinstance(answer, AskError):  # MovedError is one
                asking = not isinstance(answer, MovedError)
                moved.setdefault((answer.host, answer.port, asking), []).append(place)
        if moved:
            self._refresh(cluster)
        for (host, port, asking), part in moved.items():
            node = cluster.node_at(host, port)
            await self._run(call, [(node, list(split(part)))], asking=asking)

    async def _know_slots(self) -> None:
        if isinstance(self._topology, ClusterNodes) and not self._topology.known:
            await self._learn_slots(self._topology)

    def _refresh(self, cluster: ClusterNodes) -> None:
        """Reads the slots anew in the background, once at a time."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.ensure_future(self._try_to_learn(cluster))

    async def _try_to_learn(self, cluster: ClusterNodes) -> None:
        try:
            await self._learn_slots(cluster)
        except (BackendDown, BackendBusy):
            return  # the next failure or redirection asks again

    async def _learn_slots(self, cluster: ClusterNodes) -> None:
        problem: BackendDown | None = None
        for node in cluster.to_ask():
            try:
                (ranges,) = await self._try(node, [(b"CLUSTER", b"SLOTS")])
            except BackendDown as error:
                problem = problem or error
            else:
                if ranges:
                    cluster.learn(node, ranges)
                    return
                problem = problem or BackendDown(f"redis: {node.name}: the cluster serves no slots")
        assert problem is not None
        raise problem

    def _partly(self, problem: str) -> BackendDown:
        """Down altogether once no node is left that is believed to answer."""
        nodes = self._topology.primaries()
        all_away = all(node.breaker is not None and not node.breaker.closed for node in nodes)
        return BackendDown(problem) if all_away else BackendPartlyDown(problem)

    async def _try(self, node: RedisNode, commands: Sequence[Command], num_bytes: int = 0) -> list[Any]:
        try:
            answers = await self._round_trip(node, commands, num_bytes)
            for answer in answers:
                if isinstance(answer, Exception) and _is_failure(answer):
                    raise BackendDown(f"redis: {node.name}: {reason_of(answer)}") from answer
        except BaseException as error:
            down = isinstance(error, BackendDown)
            if node.breaker is not None and (down or not node.breaker.closed):
                node.breaker.failed()
            if down and isinstance(self._topology, ClusterNodes) and self._topology.known:
                self._refresh(self._topology)
            raise
        if node.breaker is not None:
            node.breaker.succeeded()
        return answers

    async def _round_trip(self, node: RedisNode, commands: Sequence[Command], num_bytes: int) -> list[Any]:
        if self._slots.locked():
            await self._wait_for_turn()
        else:
            await self._slots.acquire()  # at once
        try:
            return await node.round_trip(commands, self._timeout_s, num_bytes=num_bytes)
        except (RedisError, OSError) as error:
            raise BackendDown(f"redis: {node.name}: {reason_of(error)}") from error
        finally:
            self._slots.release()

    async def _wait_for_turn(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._slots.acquire()
        except TimeoutError as error:
            raise BackendBusy(f"redis: all {self._connections} connections are in use") from error


def _is_failure(answer: Exception) -> bool:
    """The server cannot do its work; a redirection (and the transaction that it ends) or a lack of room
    concerns single keys."""
    return not (isinstance(answer, AskError | ExecAbortError) or _is_no_room(answer))


def _is_no_room(answer: object) -> bool:
    """Full, a replica, or unable to persist: it serves reads and takes no writes."""
    if isinstance(answer, OutOfMemoryError | ReadOnlyError):
        return True
    return isinstance(answer, ResponseError) and str(answer).startswith("MISCONF")


def reason_of(error: BaseException) -> str:
    """The kind and the server's words, which never hold the password that we sent."""
    if isinstance(error, RedisTimeoutError | RedisConnectionError | ResponseError):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__
