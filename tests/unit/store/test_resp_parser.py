"""Answers of Redis cut at every place: what comes out is the same."""

import random
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, MovedError, OutOfMemoryError
from redis.exceptions import TimeoutError as RedisTimeoutError

from reprise_store.adapters.redis_node import pack
from reprise_store.adapters.resp_parser import BlockParser

LARGE = random.Random(3).randbytes(20_000)
STREAM = (
    b"+OK\r\n:42\r\n$-1\r\n*-1\r\n$0\r\n\r\n$5\r\na\r\nbc\r\n"
    + b"$%d\r\n%b\r\n" % (len(LARGE), LARGE)
    + b"*2\r\n$1\r\n0\r\n*2\r\n:1\r\n$%d\r\n%b\r\n" % (len(LARGE), LARGE)
    + b"-OOM full\r\n-MOVED 7 10.0.0.1:6380\r\n$30000\r\n"
    + b"z" * 30_000
    + b"\r\n+end\r\n"
)


class Wire:
    """A socket that gives the bytes in pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def recv_into(self, target: memoryview) -> int:
        if not self._pieces:
            return 0
        piece = self._pieces.pop(0)
        taken = min(len(piece), len(target))
        target[:taken] = piece[:taken]
        if taken < len(piece):
            self._pieces.insert(0, piece[taken:])
        return taken

    def recvmsg_into(self, targets: list[memoryview]) -> tuple[int, None, int, None]:
        """One piece, over as many targets as it takes."""
        if not self._pieces:
            return 0, None, 0, None
        piece, given = Wire([self._pieces.pop(0)]), 0
        for target in targets:
            given += piece.recv_into(target)
        self._pieces[:0] = piece._pieces
        return given, None, 0, None


class FakeConnection:
    def __init__(self, wire: Any) -> None:
        self._sock = wire


def parser_of(
    wire: Any,
    rooms: list[memoryview] | None = None,
    max_bulk_bytes: int = 25_000,
    scatters: bool = True,
) -> BlockParser:
    def allocate(nbytes: int) -> memoryview | None:
        if rooms is None:
            return None
        rooms.append(memoryview(bytearray(nbytes)))
        return rooms[-1]

    parser = BlockParser(0, allocate=allocate, max_bulk_bytes=max_bulk_bytes, scatters=scatters)
    parser.on_connect(FakeConnection(wire))
    return parser


def check(parser: BlockParser) -> None:
    assert parser.read_responses(6, 60) == [b"OK", 42, None, None, b"", b"a\r\nbc"]
    assert parser.read_response() == LARGE
    assert parser.read_response() == [b"0", [1, LARGE]]
    assert isinstance(parser.read_response(), OutOfMemoryError)
    moved = parser.read_response()
    assert isinstance(moved, MovedError)
    assert (moved.host, moved.port) == ("10.0.0.1", 6380)
    assert parser.read_response() is None  # over the limit
    assert parser.read_response() == b"end"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 4095, 4096, 4097, 10**6])
def test_pieces_of_one_size(size: int) -> None:
    for scatters in (True, False):
        check(parser_of(Wire([STREAM[i : i + size] for i in range(0, len(STREAM), size)]), scatters=scatters))


@pytest.mark.parametrize("size", [1, 3, 4, 10**6])
def test_numbers_one_after_another_among_other_answers(size: int) -> None:
    stream = b":1\r\n:0\r\n:12\r\n:7\r\n+OK\r\n" + b":1\r\n" * 2000 + b":-3\r\n:2\r\n"
    parser = parser_of(Wire([stream[i : i + size] for i in range(0, len(stream), size)]))
    assert parser.read_responses(3, 60) == [1, 0, 12]
    assert parser.read_responses(2003, 60) == [7, b"OK", *[1] * 2000, -3]
    assert parser.read_response() == 2


def test_pieces_of_any_size() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(50):
        pieces, start = [], 0
        while start < len(STREAM):
            stop = start + rng.choice((1, 5, 60, 3000, 30_000))
            pieces.append(STREAM[start:stop])
            start = stop
        check(parser_of(Wire(pieces)))


def test_large_values_are_received_in_the_place_that_was_given() -> None:
    rooms: list[memoryview] = []
    parser = parser_of(Wire([STREAM]), rooms)
    check(parser)
    assert [bytes(room) for room in rooms] == [LARGE, LARGE]


def test_the_end_and_what_is_no_answer() -> None:
    with pytest.raises(RedisConnectionError, match="closed"):
        parser_of(Wire([b"$5\r\nab"])).read_response()
    with pytest.raises(InvalidResponse):
        parser_of(Wire([b"HTTP/1.1 400\r\n"])).read_response()
    with pytest.raises(InvalidResponse, match="line of more than"):
        parser_of(Wire([b"x" * 100_000])).read_response()


def test_an_answer_that_trickles_ends_in_time() -> None:
    class Trickle:
        def recv_into(self, target: memoryview) -> int:
            target[0] = ord("x")
            return 1

    parser = parser_of(Trickle(), scatters=False)
    parser._stop = len(b"$20000\r\n")
    parser._view[: parser._stop] = b"$20000\r\n"
    with pytest.raises(RedisTimeoutError):
        parser.read_responses(1, 0)


def test_long_arguments_are_sent_from_where_they_are() -> None:
    value = memoryview(bytearray(LARGE))
    pieces = pack([(b"SET", b"k", value), (b"GET", memoryview(b"k"))])
    assert b"".join(pieces) == (
        b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$20000\r\n" + LARGE + b"\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"
    )
    assert pieces[1] is value
