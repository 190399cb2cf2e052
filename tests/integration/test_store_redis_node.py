"""Round trips with a server that answers as no Redis does: too slowly, or not to the end."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from reprise_store.adapters.redis_connections import Connector, RedisSecurity
from reprise_store.adapters.redis_node import MAX_ON_LOOP_BYTES, RedisNode
from reprise_store.redis_address import parse_redis_url

SMALL, LARGE = 1, MAX_ON_LOOP_BYTES + 1
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def node_that(answers: Answer) -> AsyncIterator[RedisNode]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (line := await reader.readline()) and line != b"GET\r\n":
            if line in (b"CLIENT\r\n", b"SELECT\r\n"):  # redis-py introduces itself
                writer.write(b"+OK\r\n")
        if line:
            await answers(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connector = Connector(
        parse_redis_url(f"redis://127.0.0.1:{port}/0"),
        RedisSecurity(),
        timeout_s=30,
        allocate=lambda nbytes: None,
        max_bulk_bytes=1 << 30,
    )
    threads = ThreadPoolExecutor(2)
    try:
        yield RedisNode("slow", lambda: connector.to_host("127.0.0.1", port), threads)
    finally:
        server.close()
        threads.shutdown()


@pytest.mark.parametrize("num_bytes", [SMALL, LARGE])
async def test_an_answer_that_trickles_ends_in_time(num_bytes: int) -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"$100000000\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await asyncio.sleep(0.01)

    async with node_that(trickle) as node:
        started_s = time.monotonic()
        with pytest.raises(RedisTimeoutError, match="too long"):
            await node.round_trip([(b"GET", b"k")], 0.5, num_bytes=num_bytes)
        assert time.monotonic() - started_s >= 0.5
        assert not node._idle


@pytest.mark.parametrize("num_bytes", [SMALL, LARGE])
async def test_an_answer_that_breaks_off_is_a_broken_connection(num_bytes: int) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"$100000\r\n" + b"x" * 5000)
        writer.close()

    async with node_that(break_off) as node:
        with pytest.raises((RedisConnectionError, ConnectionError)):
            await node.round_trip([(b"GET", b"k")], 30, num_bytes=num_bytes)
        assert not node._idle


@pytest.mark.parametrize("num_bytes", [SMALL, LARGE])
async def test_a_server_that_does_not_read_ends_in_time(num_bytes: int) -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(60)

    async with node_that(never) as node:
        value = bytes(64 << 20)
        with pytest.raises(RedisTimeoutError):
            await node.round_trip([(b"GET", b"k"), (b"SET", b"k", value)], 0.5, num_bytes=num_bytes)


async def test_whoever_is_cancelled_closes_the_connection_once_no_thread_has_it() -> None:
    asked = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await asyncio.sleep(0.2)
        writer.write(b"$1\r\nv\r\n")
        assert await reader.read() == b""  # the end

    for num_bytes in (SMALL, LARGE):
        asked.clear()
        async with node_that(late) as node:
            call = asyncio.ensure_future(node.round_trip([(b"GET", b"k")], 30, num_bytes=num_bytes))
            await asyncio.wait_for(asked.wait(), 30)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.sleep(0.4)
            assert not node._idle
