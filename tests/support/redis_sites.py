"""Every way that Redis can be set up, with real servers: what a store is told, and how a test empties it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import trustme

from reprise_store.adapters.redis_backend import RedisBackend, RedisLimits
from reprise_store.adapters.redis_connections import RedisSecurity
from reprise_store.breaker import CircuitBreaker
from support.valkey_server import START_TIMEOUT_S, TlsFiles, ValkeyProcess, free_port, tls_server_binary

LIMITS = RedisLimits(
    timeout_s=2.0,
    connections=4,
    chunk_bytes=64 * 1024,
    chunk_keys=7,
    max_value_bytes=8 * 1024 * 1024,
    ttl_s=0,
)
SERVICE = "blocks"
ACL = ("~test:*", "+get", "+getex", "+set", "+exists", "+incr", "+unlink", "+scan", "+multi", "+exec")
ACL_CONNECTION = ("+ping", "+info", "+select", "+client|setname", "+cluster|slots")


@dataclass
class RedisSite:
    url: str
    servers: list[ValkeyProcess]
    """Primaries."""
    replicas: list[ValkeyProcess] = field(default_factory=list)
    security: dict[str, str] = field(default_factory=dict)

    def flush(self) -> None:
        for server in self.servers:
            server.command("FLUSHALL")

    def settings(self) -> dict[str, str]:
        """As a store is told."""
        return {"redis_url": self.url, **{f"redis_{name}": value for name, value in self.security.items()}}

    def backend(self, limits: RedisLimits = LIMITS, **options: Any) -> RedisBackend:
        return make_backend(self.url, limits, security=RedisSecurity(**self.security), **options)


def make_backend(url: str, limits: RedisLimits = LIMITS, **options: Any) -> RedisBackend:
    return RedisBackend(url, limits, make_breaker=make_breaker, **options)


def make_breaker() -> CircuitBreaker:
    return CircuitBreaker(failures=2, cooldown_s=0.2, clock=monotonic)


@contextmanager
def unix_site(folder: Path) -> Iterator[RedisSite]:
    server = ValkeyProcess(folder, unix=True).start()
    try:
        yield RedisSite(server.url, [server])
    finally:
        server.kill()


@contextmanager
def acl_site(folder: Path) -> Iterator[RedisSite]:
    """A user with no more rights than the store needs, whose password is in a file."""
    user = ("--user", "blocks", "on", ">p@ss/word", *ACL, *ACL_CONNECTION)
    server = ValkeyProcess(folder, *user, password="admin").start()
    (folder / "password").write_text("p@ss/word\n")
    try:
        url = f"redis://blocks@127.0.0.1:{server.port}"
        yield RedisSite(url, [server], security={"password_file": str(folder / "password")})
    finally:
        server.kill()


@contextmanager
def tls_site(folder: Path, server_identity: str = "127.0.0.1") -> Iterator[RedisSite]:
    skip_without_tls()
    authority = trustme.CA()
    files = make_tls_files(folder, authority, "server", server_identity)
    ours = make_tls_files(folder, authority, "client", "store")
    server = ValkeyProcess(folder, tls=files, password="p@ss/word").start()
    try:
        security = {
            "tls_ca_file": str(ours.ca),
            "tls_cert_file": str(ours.cert),
            "tls_key_file": str(ours.key),
        }
        yield RedisSite(f"rediss://:p%40ss%2Fword@127.0.0.1:{server.port}", [server], security=security)
    finally:
        server.kill()


def skip_without_tls() -> None:
    if tls_server_binary() is None:
        pytest.skip("no valkey-server or redis-server with TLS in PATH; the embedded Valkey has none")


def make_tls_files(folder: Path, authority: trustme.CA, name: str, identity: str) -> TlsFiles:
    files = TlsFiles(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")
    certificate = authority.issue_cert(identity)
    authority.cert_pem.write_to_path(files.ca)
    certificate.cert_chain_pems[0].write_to_path(files.cert)
    certificate.private_key_pem.write_to_path(files.key)
    return files


@contextmanager
def cluster_site(
    folder: Path, num_nodes: int = 3, tls: TlsFiles | None = None, *, with_replicas: bool = False
) -> Iterator[RedisSite]:
    """Primaries alone: what lives on a node that is away is away; or each with a replica that takes over."""
    with ExitStack() as stack:
        servers, bus_ports = [], [free_port() for _ in range(2 * num_nodes if with_replicas else num_nodes)]
        for number, bus_port in enumerate(bus_ports):
            (folder / str(number)).mkdir()
            options = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"]
            options += ["--cluster-port", str(bus_port), "--cluster-node-timeout", "2000"]
            options += ["--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"]
            options += ["--tls-cluster", "yes"] if tls else []
            server = ValkeyProcess(folder / str(number), *options, tls=tls).start()
            stack.callback(server.kill)
            servers.append(server)
        servers, replicas = servers[:num_nodes], servers[num_nodes:]
        for number, server in enumerate(servers):
            first, last = number * 16384 // num_nodes, (number + 1) * 16384 // num_nodes - 1
            server.command("CLUSTER", "ADDSLOTSRANGE", first, last)
            server.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server, bus_port in zip([*servers, *replicas], bus_ports, strict=True):
            servers[0].command("CLUSTER", "MEET", "127.0.0.1", server.port, bus_port)
        wait_for(lambda: all(_sees_all_slots(server) for server in [*servers, *replicas]))
        for server, replica in zip(servers, replicas, strict=False):
            replica.command("CLUSTER", "REPLICATE", server.command("CLUSTER", "MYID"))
        wait_for(lambda: all(_is_in_sync(replica) for replica in replicas))
        scheme = "rediss-cluster" if tls else "redis-cluster"
        yield RedisSite(f"{scheme}://127.0.0.1:1,127.0.0.1:{servers[-1].port}", servers, replicas)


def _is_in_sync(replica: ValkeyProcess) -> bool:
    """And everybody knows it, for otherwise it gets no votes."""
    name = replica.command("CLUSTER", "MYID")
    nodes = bytes(replica.command("CLUSTER", "NODES")).splitlines()
    known = any(line.startswith(name) and b"slave" in line for line in nodes)
    return known and replica.command("INFO", "replication")["master_link_status"] == "up"


def _sees_all_slots(server: ValkeyProcess) -> bool:
    info = bytes(server.command("CLUSTER", "INFO")).splitlines()
    return b"cluster_state:ok" in info and b"cluster_slots_ok:16384" in info


@contextmanager
def sentinel_site(
    folder: Path, down_after_ms: int = 20_000, tls: TlsFiles | None = None
) -> Iterator[RedisSite]:
    """One primary, one replica, one sentinel that suffices for a fail-over."""
    with ExitStack() as stack:
        for name in ("primary", "replica", "sentinel"):
            (folder / name).mkdir()
        secure = ("--tls-replication", "yes") if tls else ()
        fast = ("--repl-diskless-sync-delay", "0", "--masterauth", "secret", *secure)
        primary = ValkeyProcess(folder / "primary", *fast, password="secret", tls=tls).start()
        stack.callback(primary.kill)
        replica = ValkeyProcess(
            folder / "replica", *fast, "--replicaof", f"127.0.0.1 {primary.port}", password="secret", tls=tls
        ).start()
        stack.callback(replica.kill)
        config = folder / "sentinel" / "sentinel.conf"
        config.write_text(
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} 1\n"
            f"sentinel auth-pass {SERVICE} secret\n"
            f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
        )
        sentinel = ValkeyProcess(
            folder / "sentinel", *secure, password="guard", mode=(str(config), "--sentinel"), tls=tls
        ).start()
        stack.callback(sentinel.kill)
        (folder / "guard").write_text("guard")
        wait_for(lambda: sentinel.command("SENTINEL", "REPLICAS", SERVICE))
        wait_for(lambda: replica.command("INFO", "replication")["master_link_status"] == "up")
        scheme = "rediss-sentinel" if tls else "redis-sentinel"
        url = f"{scheme}://:secret@127.0.0.1:1,127.0.0.1:{sentinel.port}/{SERVICE}"
        yield RedisSite(url, [primary], [replica], {"sentinel_password_file": str(folder / "guard")})


def wait_for(condition: Any) -> None:
    deadline_s = monotonic() + 3 * START_TIMEOUT_S
    while not condition():
        assert monotonic() < deadline_s
        sleep(0.02)


SITES = {
    "unix": unix_site,
    "acl": acl_site,
    "tls": tls_site,
    "cluster": cluster_site,
    "sentinel": sentinel_site,
}
