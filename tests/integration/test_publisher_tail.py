"""`reprise events tail` against a real publisher, and against hand-made frames of other engines."""

import asyncio
import io
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import msgspec
import pytest
import zmq

from reprise_cli.events import short_hash, tail
from reprise_core.errors import InvalidInput
from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch
from reprise_wire.event_codec import EventForm, encode_batch
from reprise_wire.source_sockets import SourceAddress
from support.publisher_harness import TOPIC, running_publisher
from support.waiting import until

STORED = BlockStored(
    block_hashes=(2**64 - 1, 1),
    parent_block_hash=7,
    token_ids=tuple(range(32)),
    block_size=16,
    lora_id=None,
    medium="GPU",
    lora_name=None,
    group_idx=0,
)
BATCH = KvEventBatch(
    1_700_000_000.0, (STORED, BlockRemoved(block_hashes=(b"\0" * 24 + b"\xff" * 8,), medium="CPU")), 0
)


class FakePublisher:
    """A PUB and a ROUTER whose frames the test writes."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.pub, self.router = self.context.socket(zmq.XPUB), self.context.socket(zmq.ROUTER)
        self.pub.linger = self.router.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"

    def wait_for_subscriber(self) -> None:
        assert self.pub.poll(5000)
        self.pub.recv()

    def send(self, sequence: int, payload: bytes, topic: bytes = b"t") -> None:
        self.pub.send_multipart([topic, sequence.to_bytes(8, "big"), payload])

    def answer(self, *sequences: int, payload: bytes) -> int:
        """Answers one replay request in the older form of four frames; where it began. Its subscriber asks
        from one batch before those that it misses, to know the publisher again."""
        assert self.router.poll(5000)
        identity, _, start = self.router.recv_multipart()
        for sequence in sequences:
            self.router.send_multipart([identity, b"", sequence.to_bytes(8, "big"), payload])
        self.router.send_multipart([identity, b"", b"\xff" * 8, b""])
        return int.from_bytes(start, "big")

    def address(self, *, replay: bool = False) -> SourceAddress:
        return SourceAddress("fake", self.endpoint, self.replay if replay else "")


@pytest.fixture
def fake() -> Iterator[FakePublisher]:
    publisher = FakePublisher()
    yield publisher
    publisher.context.destroy(linger=0)


def in_background(call: Callable[[], int]) -> "Future[int]":
    done: Future[int] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


@pytest.mark.parametrize("form", list(EventForm))
def test_readable_lines_for_every_encoding(fake: FakePublisher, form: EventForm) -> None:
    out = io.StringIO()
    done = in_background(lambda: tail(fake.address(), count=2, file=out))
    fake.wait_for_subscriber()
    fake.send(4, encode_batch(BATCH, form=form))
    fake.send(5, encode_batch(KvEventBatch(1.0, (AllBlocksCleared(),), 1), form=form))
    assert done.result(5) == 0
    lines = out.getvalue().splitlines()
    assert "seq 4" in lines[0]
    assert " ".join(lines[1].split()) == (
        "stored GPU group 0 2 blocks 32 tokens ffffffff 00000000 after 00000000"
    )
    assert lines[2].split() == ["removed", "CPU", "group", "0", "1", "block", "ffffffff"]
    assert "seq 5  rank 1" in lines[3]
    assert lines[4].split() == ["cleared", "all", "blocks"]


def test_json_has_every_field_and_whole_hashes(fake: FakePublisher) -> None:
    out = io.StringIO()
    done = in_background(lambda: tail(fake.address(), count=1, as_json=True, file=out))
    fake.wait_for_subscriber()
    fake.send(4, encode_batch(BATCH))
    done.result(5)
    (line,) = [json.loads(line) for line in out.getvalue().splitlines()]
    assert (line["seq"], line["topic"], line["rank"], line["replayed"]) == (4, "t", 0, False)
    stored, removed = line["events"]
    assert stored["block_hashes"] == [2**64 - 1, 1]
    assert stored["num_tokens"] == 32
    assert removed["block_hashes"] == ["00" * 24 + "ff" * 8]


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("with_tokens", [True, False])
def test_token_ids_are_shown_only_when_asked_for(
    fake: FakePublisher, as_json: bool, with_tokens: bool
) -> None:
    out = io.StringIO()
    done = in_background(
        lambda: tail(fake.address(), count=1, as_json=as_json, with_tokens=with_tokens, file=out)
    )
    fake.wait_for_subscriber()
    stored = msgspec.structs.replace(STORED, token_ids=(987_654,) * 32, lookahead_token_ids=((987_654,), ()))
    fake.send(4, encode_batch(KvEventBatch(1.0, (stored,), 0)))
    done.result(5)
    assert ("987654" in out.getvalue()) is with_tokens


def test_a_gap_is_said_without_a_replay_and_a_restart_too(fake: FakePublisher) -> None:
    out = io.StringIO()
    done = in_background(lambda: tail(fake.address(), count=4, as_json=True, file=out))
    fake.wait_for_subscriber()
    for sequence in (4, 8, 1, 2):
        fake.send(sequence, encode_batch(BATCH))
    done.result(5)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line.get("notice", line.get("seq")) for line in lines] == [4, "gap", 8, "restart", "gap", 1, 2]
    assert (lines[1]["first"], lines[1]["last"]) == (5, 7)


def test_a_gap_is_filled_from_the_replay_of_an_older_publisher(fake: FakePublisher) -> None:
    out = io.StringIO()
    done = in_background(lambda: tail(fake.address(replay=True), count=6, as_json=True, file=out))
    fake.wait_for_subscriber()
    batch = encode_batch(BATCH)
    fake.send(4, batch)
    fake.send(8, batch)
    assert fake.answer(4, 5, 6, 7, 8, 9, payload=batch) == 4
    fake.send(9, batch)
    fake.send(10, batch)
    done.result(5)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    kinds = [(line["seq"], line["kind"]) for line in lines if "seq" in line]
    assert [sequence for sequence, _ in kinds] == [4, 5, 6, 7, 8, 9]
    assert kinds[1:4] == [(5, "replay"), (6, "replay"), (7, "replay")]
    assert [line["notice"] for line in lines if "notice" in line] == ["behind"]


def test_a_hole_in_the_replay_is_asked_for_twice_and_then_said(fake: FakePublisher) -> None:
    out = io.StringIO()
    done = in_background(lambda: tail(fake.address(replay=True), count=5, as_json=True, file=out))
    fake.wait_for_subscriber()
    batch = encode_batch(BATCH)
    fake.send(4, batch)
    fake.send(8, batch)
    assert fake.answer(4, 6, 7, 8, payload=batch) == 4
    assert fake.answer(4, 6, 7, 8, payload=batch) == 4
    fake.send(9, batch)
    done.result(5)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    shown = [line.get("notice", line.get("seq")) for line in lines]
    assert shown == [4, "behind", "replay", "gap", 6, 7, 8, 9]


def test_what_cannot_be_read_is_said_and_passed_over(fake: FakePublisher) -> None:
    out = io.StringIO()
    done = in_background(lambda: tail(fake.address(), count=2, as_json=True, file=out))
    fake.wait_for_subscriber()
    fake.pub.send_multipart([b"t", b"only two"])
    fake.pub.send_multipart([b"t", b"short", b"x"])
    fake.send(1, b"\xc1")
    fake.send(2, msgspec.msgpack.encode([1.0, [{"type": "Novel"}, {"type": "AllBlocksCleared"}], 0]))
    fake.send(3, encode_batch(BATCH))
    done.result(5)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    notices = [line["notice"] for line in lines if "notice" in line]
    assert notices == ["malformed", "malformed", "malformed", "unknown"]
    assert [line["seq"] for line in lines if "seq" in line] == [2, 3]


async def test_from_the_beginning_then_live() -> None:
    async with running_publisher() as publisher:
        for _ in range(5):
            publisher.scheduler.offer()
        await publisher.published(6)
        sockets = publisher.app.sockets
        assert sockets is not None
        out = io.StringIO()
        following = asyncio.ensure_future(
            asyncio.to_thread(
                lambda: tail(
                    SourceAddress("p", sockets.events_endpoint, sockets.replay_endpoint, "kv@"),
                    start=0,
                    count=12,
                    as_json=True,
                    file=out,
                )
            )
        )
        await until(lambda: out.getvalue().count("\n") >= 6)
        while not following.done():
            publisher.scheduler.offer()
            await asyncio.sleep(0.02)
        lines = [json.loads(line) for line in out.getvalue().splitlines()]
        assert [line["seq"] for line in lines] == list(range(12))
        assert all(line["topic"] == TOPIC for line in lines)


def test_a_replay_that_does_not_answer_is_said(fake: FakePublisher) -> None:
    out = io.StringIO()
    address = SourceAddress("fake", fake.endpoint, "tcp://127.0.0.1:1")
    done = in_background(lambda: tail(address, start=0, count=1, as_json=True, file=out))
    fake.wait_for_subscriber()
    fake.send(3, encode_batch(BATCH))
    done.result(15)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line.get("notice", line.get("seq")) for line in lines] == ["replay", "replay", 3]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"--from: needs --replay"):
        tail(SourceAddress("p", "tcp://127.0.0.1:1"), start=3)
    with pytest.raises(InvalidInput, match=r"--snapshot: needs --replay"):
        tail(SourceAddress("p", "tcp://127.0.0.1:1"), snapshot=True)
    with pytest.raises(InvalidInput, match=r"--endpoint: 'nonsense'"):
        tail(SourceAddress("p", "nonsense"))


def test_short_hashes_agree_between_forms() -> None:
    digest = bytes(range(32))
    assert short_hash(digest) == short_hash(int.from_bytes(digest[-8:], "big")) == "18191a1b"
