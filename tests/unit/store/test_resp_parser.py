"""Answers of Redis cut at every place: what comes out is the same."""

import random
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, MovedError, OutOfMemoryError

from reprise_store.adapters.redis_node import pack
from reprise_store.adapters.resp_parser import MAX_TURN_NBYTES, BlockParser

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


class Halting(Wire):
    """One that does not block: there is nothing to read before each piece."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__(pieces)
        self._ready = False

    def _check(self) -> None:
        self._ready = not self._ready
        if self._ready:
            raise BlockingIOError

    def recv_into(self, target: memoryview) -> int:
        self._check()
        return super().recv_into(target)

    def recvmsg_into(self, targets: list[memoryview]) -> tuple[int, None, int, None]:
        self._check()
        return super().recvmsg_into(targets)


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


def read(parser: BlockParser, count: int) -> list[Any]:
    reading = parser.responses(count)
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return list(end.value)


def check(parser: BlockParser) -> None:
    assert read(parser, 6) == [b"OK", 42, None, None, b"", b"a\r\nbc"]
    large, scanned, full, moved = read(parser, 4)
    assert large == LARGE
    assert scanned == [b"0", [1, LARGE]]
    assert isinstance(full, OutOfMemoryError)
    assert isinstance(moved, MovedError)
    assert (moved.host, moved.port) == ("10.0.0.1", 6380)
    assert read(parser, 2) == [None, b"end"]  # over the limit


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 4095, 4096, 4097, 10**6])
def test_pieces_of_one_size(size: int) -> None:
    for scatters in (True, False):
        for wire in (Wire, Halting):
            pieces = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
            check(parser_of(wire(pieces), scatters=scatters))


@pytest.mark.parametrize("size", [1, 3, 4, 10**6])
def test_numbers_one_after_another_among_other_answers(size: int) -> None:
    stream = b":1\r\n:0\r\n:12\r\n:7\r\n+OK\r\n" + b":1\r\n" * 2000 + b":-3\r\n:2\r\n"
    parser = parser_of(Wire([stream[i : i + size] for i in range(0, len(stream), size)]))
    assert read(parser, 3) == [1, 0, 12]
    assert read(parser, 2003) == [7, b"OK", *[1] * 2000, -3]
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


def test_much_to_read_leaves_others_their_turn() -> None:
    value = b"$%d\r\n%b\r\n" % (len(LARGE), LARGE)

    def num_turns(scatters: bool) -> int:
        return sum(1 for _ in parser_of(Wire([value] * 200), scatters=scatters).responses(200))

    assert num_turns(scatters=True) == 200 * len(value) // MAX_TURN_NBYTES
    assert num_turns(scatters=False) == 0  # TLS: what is left in its buffer makes no socket readable


def test_long_arguments_are_sent_from_where_they_are() -> None:
    value = memoryview(bytearray(LARGE))
    pieces = pack([(b"SET", b"k", value), (b"GET", memoryview(b"k"))])
    assert b"".join(pieces) == (
        b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$20000\r\n" + LARGE + b"\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"
    )
    assert pieces[1] is value
