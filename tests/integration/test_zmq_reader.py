"""Reading a ZMQ socket on the event loop: nothing is lost, and a busy peer keeps nobody else waiting."""

import asyncio
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from reprise_runtime.zmq_sockets import Handler, SocketReader
from support.waiting import until


@contextmanager
def pair(on_message: Handler, *, copy: bool = True) -> Iterator[tuple[zmq.Socket, zmq.Socket, SocketReader]]:
    """The reading socket, its peer, and the reader, not yet started."""
    context = zmq.Context()
    reading, peer = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    reading.bind("inproc://here")
    peer.connect("inproc://here")
    reader = SocketReader(reading, on_message, copy=copy)
    try:
        yield reading, peer, reader
    finally:
        reader.stop()
        reading.close(0)
        peer.close(0)
        context.term()


async def test_what_a_message_wakes_runs_before_the_next_is_read() -> None:
    """Also when the waker sent something, after which the socket is looked at again."""
    order: list[str] = []
    woken = asyncio.Event()

    def on_message(frames: list[bytes]) -> None:
        order.append(frames[0].decode())
        reading.send(b"answer")
        reader.kick()
        woken.set()

    async def write() -> None:
        while True:
            await woken.wait()
            woken.clear()
            order.append("woken")

    with pair(on_message) as (reading, peer, reader):
        writer = asyncio.create_task(write())
        await asyncio.sleep(0)
        for name in (b"a", b"b", b"c"):
            peer.send(name)
        reader.start()
        await until(lambda: len(order) == 6)
        writer.cancel()
    assert order == ["a", "woken", "b", "woken", "c", "woken"]


async def test_input_that_has_arrived_is_not_kept_waiting_by_a_queue_of_messages() -> None:
    """As gRPC tells that a message is sent: a readable descriptor, whose callback wakes a coroutine."""
    num_read = 0
    read_at: list[int] = []
    receive, send = os.pipe()
    loop = asyncio.get_running_loop()

    def on_message(frames: list[bytes]) -> None:
        nonlocal num_read
        num_read += 1
        if num_read == 10:
            os.write(send, b"x")

    async def wait_for_input() -> None:
        arrived = loop.create_future()
        loop.add_reader(receive, lambda: arrived.done() or arrived.set_result(None))
        await arrived
        loop.remove_reader(receive)
        read_at.append(num_read)

    with pair(on_message) as (_, peer, reader):
        waiter = asyncio.create_task(wait_for_input())
        await asyncio.sleep(0)
        for _ in range(200):
            peer.send(b"")
        reader.start()
        await until(lambda: num_read == 200)
        await waiter
    os.close(receive)
    os.close(send)
    assert read_at[0] in (10, 11)


async def test_a_handler_that_raises_loses_only_its_own_message() -> None:
    seen: list[bytes] = []
    problems: list[BaseException | None] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, info: problems.append(info.get("exception")))

    def on_message(frames: list[bytes]) -> None:
        if frames[0] == b"bad":
            raise ValueError("bad")
        seen.append(frames[0])

    with pair(on_message) as (_, peer, reader):
        for name in (b"a", b"bad", b"b"):
            peer.send(name)
        reader.start()
        await until(lambda: len(seen) == 2)
    assert seen == [b"a", b"b"]
    assert [str(problem) for problem in problems] == ["bad"]


async def test_a_paused_reader_leaves_messages_in_the_queue_and_is_quiet() -> None:
    """Quiet: the descriptor is not readable, or the event loop would turn without end."""
    seen: list[bytes] = []

    def on_message(frames: list[zmq.Frame]) -> None:
        seen.append(frames[0].bytes)
        if frames[0].bytes == b"a":
            reader.pause()

    with pair(on_message, copy=False) as (reading, peer, reader):
        reader.start()
        peer.send(b"a")
        await until(lambda: seen == [b"a"])
        for name in (b"b", b"c"):
            peer.send(name)
        await until(lambda: not select.select([reading.getsockopt(zmq.FD)], [], [], 0)[0])
        assert reading.poll(0)
        assert seen == [b"a"]
        reader.resume()
        await until(lambda: seen == [b"a", b"b", b"c"])


@pytest.mark.parametrize("burst", [1, 500])
async def test_every_message_is_read_in_order_while_both_sides_send(burst: int) -> None:
    seen: list[int] = []

    def on_message(frames: list[bytes]) -> None:
        seen.append(int(frames[0]))
        reading.send(b"")
        reader.kick()

    with pair(on_message) as (reading, peer, reader):
        reader.start()
        for first in range(0, 1000, burst):
            for number in range(first, first + burst):
                peer.send(b"%d" % number)
            await until(lambda first=first: len(seen) == first + burst)
            while peer.poll(0):
                peer.recv()
    assert seen == list(range(1000))
