"""Which server has a key: one server, or the nodes of a cluster by hash slot."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from redis.crc import key_slot

from reprise_store.adapters.redis_connections import Connector
from reprise_store.adapters.redis_node import RedisNode
from reprise_store.breaker import CircuitBreaker
from reprise_store.redis_address import RedisAddress, RedisKind

NUM_SLOTS = 16384
Host = tuple[str, int]


class OneNode:
    """One server, whichever it is just now."""

    sharded = False

    def __init__(self, node: RedisNode) -> None:
        self.node = node

    def primaries(self) -> list[RedisNode]:
        return [self.node]

    def node_of(self, key: bytes) -> RedisNode | None:
        return self.node


class ClusterNodes:
    """The cluster as one of its nodes told it last. Nodes that left are forgotten with their connections.

    Every node has a breaker of its own: one that is away costs its keys, and no time.
    """

    sharded = True
    """Keys lie on several servers."""

    def __init__(
        self,
        seeds: Sequence[Host],
        connector: Connector,
        threads: Executor,
        make_breaker: Callable[[], CircuitBreaker],
    ) -> None:
        self._connector = connector
        self._threads = threads
        self._make_breaker = make_breaker
        self._nodes: dict[Host, RedisNode] = {}
        self._seeds = [self.node_at(host, port) for host, port in seeds]
        self._slots: list[RedisNode | None] = []
        self.known = False
        """Whether any node has answered yet."""

    def primaries(self) -> list[RedisNode]:
        return list(dict.fromkeys(node for node in self._slots if node is not None))

    def node_of(self, key: bytes) -> RedisNode | None:
        """None: no server has the key's slot. Only once the slots are known."""
        return self._slots[key_slot(key)]

    def node_at(self, host: str, port: int) -> RedisNode:
        """Also one that redirections name before the slots are read anew."""
        if (host, port) not in self._nodes:
            self._nodes[host, port] = RedisNode(
                f"{host}:{port}",
                lambda: self._connector.to_host(host, port),
                self._threads,
                breaker=self._make_breaker(),
            )
        return self._nodes[host, port]

    def to_ask(self) -> list[RedisNode]:
        """Nodes that may know the slots, those that answered last first."""
        nodes = list(dict.fromkeys([*self.primaries(), *self._seeds]))
        return sorted(nodes, key=lambda node: node.breaker is not None and not node.breaker.closed)

    def learn(self, asked: RedisNode, ranges: Sequence[Any]) -> None:
        """Takes in the answer to CLUSTER SLOTS; an empty host is the one that was asked."""
        slots: list[RedisNode | None] = [None] * NUM_SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            node = self.node_at(host.decode() if host else asked.name.rpartition(":")[0], port)
            slots[first : last + 1] = [node] * (last + 1 - first)
        self._slots = slots
        self.known = True
        kept = {*self.primaries(), *self._seeds}
        for place, node in list(self._nodes.items()):
            if node not in kept:
                node.forget_connections()
                del self._nodes[place]


def make_topology(
    address: RedisAddress,
    connector: Connector,
    threads: Executor,
    make_breaker: Callable[[], CircuitBreaker],
) -> OneNode | ClusterNodes:
    """Connections are made in `threads`."""
    match address.kind:
        case RedisKind.UNIX:
            return OneNode(RedisNode(address.path, connector.to_socket, threads))
        case RedisKind.SENTINEL:
            primary = connector.to_primary()
            return OneNode(RedisNode(address.service, primary, threads, follows_primary=True))
        case RedisKind.CLUSTER:
            return ClusterNodes(address.hosts, connector, threads, make_breaker)
        case RedisKind.SINGLE:
            (host, port) = address.hosts[0]
            return OneNode(RedisNode(f"{host}:{port}", lambda: connector.to_host(host, port), threads))
