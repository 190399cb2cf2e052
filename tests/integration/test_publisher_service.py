"""The publisher as schedulers and subscribers see it, over real sockets.

The subscribers here are plain pyzmq, written from the wire description alone: three frames live, five
(with the identity) in a replay.
"""

import asyncio
import time

import msgspec
import pytest
import zmq

from reprise_core.kv_events import KvEventBatch
from reprise_wire.event_codec import decode_batch, encode_batch
from reprise_wire.event_intake import INTAKE_VERSION, SourceHeader, SourceKind, batch_frames
from support.event_source import stored
from support.publisher_harness import TOPIC, RunningPublisher, payload, running_publisher
from support.waiting import until

END = b"\xff" * 8
CLEARED = [{"type": "AllBlocksCleared"}]


def events_of(batch: bytes) -> object:
    return msgspec.msgpack.decode(batch)[1]


def receive(socket: zmq.Socket) -> tuple[bytes, int, object]:
    """A live message: topic, number, decoded batch."""
    frames = socket.recv_multipart()
    assert len(frames) == 3
    return frames[0], int.from_bytes(frames[1], "big"), msgspec.msgpack.decode(frames[2])


def replay(socket: zmq.Socket, start: int, pause_s: float = 0) -> list[tuple[int, bytes]]:
    """All batches of a replay, up to the end mark."""
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    got = []
    while True:
        empty, topic, number, batch = socket.recv_multipart()
        assert empty == b""
        if number == END:
            assert (topic, batch) == (b"", b"")
            return got
        assert topic == TOPIC.encode()
        got.append((int.from_bytes(number, "big"), batch))
        time.sleep(pause_s)


async def subscribed(publisher: RunningPublisher, topic: str = "") -> zmq.Socket:
    """A subscriber that the publisher knows of: probed with batches until one arrives, then drained."""
    socket = publisher.subscriber(topic)
    socket.rcvtimeo = 50
    async with asyncio.timeout(10):
        while True:
            publisher.scheduler.offer()
            try:
                await asyncio.to_thread(socket.recv_multipart)
                break
            except zmq.Again:
                continue
    await publisher.published(publisher.scheduler.sequence + 1)
    while True:
        try:
            await asyncio.to_thread(socket.recv_multipart)
        except zmq.Again:
            socket.rcvtimeo = 5000
            return socket


async def test_three_frames_in_order_the_payload_untouched() -> None:
    async with running_publisher() as publisher:
        socket = await subscribed(publisher)
        first = publisher.scheduler.sequence
        batches = [payload(first + i) for i in range(50)]
        for batch in batches:
            publisher.scheduler.offer(batch)
        for i, batch in enumerate(batches):
            frames = await asyncio.to_thread(socket.recv_multipart)
            # One batch, the announcement at start, came before the scheduler's number 0.
            assert frames == [TOPIC.encode(), (first + i + 1).to_bytes(8, "big"), batch]


async def test_the_topic_filters_and_may_be_empty() -> None:
    async with running_publisher() as publisher:
        other = publisher.subscriber("kv@other")
        await subscribed(publisher, "kv@engine-0@")
        other.rcvtimeo = 50
        with pytest.raises(zmq.Again):
            other.recv_multipart()
    async with running_publisher(events={"topic": ""}) as publisher:
        socket = await subscribed(publisher)
        publisher.scheduler.offer()
        topic, _, _ = await asyncio.to_thread(receive, socket)
        assert topic == b""


async def test_a_stream_begins_with_cleared_at_number_0() -> None:
    async with running_publisher() as publisher:
        (number, batch), *rest = await asyncio.to_thread(replay, publisher.dealer(), 0)
        ts, events, rank = msgspec.msgpack.decode(batch)
        assert (number, events, rank, rest) == (0, [{"type": "AllBlocksCleared"}], 0, [])
        assert abs(ts - time.time()) < 60


async def test_replay_is_the_same_bytes_with_topic_and_one_end_mark() -> None:
    async with running_publisher() as publisher:
        live = await subscribed(publisher)
        start = publisher.scheduler.sequence + 1
        for _ in range(6):
            publisher.scheduler.offer()
        messages = [await asyncio.to_thread(live.recv_multipart) for _ in range(6)]
        dealer = publisher.dealer()
        got = await asyncio.to_thread(replay, dealer, start)
        assert [(number.to_bytes(8, "big"), batch) for number, batch in got] == [
            (number, batch) for _, number, batch in messages
        ]
        dealer.rcvtimeo = 100
        with pytest.raises(zmq.Again):
            dealer.recv_multipart()


async def test_a_late_subscriber_replays_what_it_missed() -> None:
    async with running_publisher() as publisher:
        for _ in range(50):
            publisher.scheduler.offer()
        await publisher.published(51)
        late = await subscribed(publisher)
        publisher.scheduler.offer()
        _, first_seen, _ = await asyncio.to_thread(receive, late)
        assert first_seen > 50
        got = await asyncio.to_thread(replay, publisher.dealer(), 0)
        assert [number for number, _ in got] == list(range(first_seen + 1))
        assert [batch for _, batch in got[1:]] == [payload(i) for i in range(first_seen)]


async def test_replay_requests_of_every_form() -> None:
    async with running_publisher(events={"buffer_steps": 3}) as publisher:
        for _ in range(5):
            publisher.scheduler.offer()
        await publisher.published(6)
        dealer = publisher.dealer()
        for start, expected in ((0, [3, 4, 5]), (4, [4, 5]), (5, [5]), (6, []), (2**64 - 1, [])):
            assert [number for number, _ in await asyncio.to_thread(replay, dealer, start)] == expected
        for request in ([b"", b""], [b"zz", b"\x05"], [b"", b"\x05"]):
            dealer.send_multipart(request)
            numbers = []
            while not numbers or numbers[-1] != END:
                numbers.append((await asyncio.to_thread(dealer.recv_multipart))[2])
            assert len(numbers) == (4 if request == [b"", b""] else 2)
        for request in ([b"\0" * 8], [b"", b"\0" * 8, b"x"], [b""] * 5):
            dealer.send_multipart(request)
        await until(lambda: publisher.metric("malformed_total", socket="replay") == 3)
        dealer.rcvtimeo = 100
        with pytest.raises(zmq.Again):
            dealer.recv_multipart()
        assert (await publisher.status()).replay_first_sequence == 3


async def test_a_slow_reader_gets_all_and_holds_up_nobody() -> None:
    async with running_publisher(replay_stall_s=5) as publisher:
        big = msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared", "pad": "x" * 20_000}], 0])
        for _ in range(1024):
            publisher.scheduler.offer(big)
        await publisher.published(1025)
        live = await subscribed(publisher)
        start = publisher.scheduler.sequence
        slow = publisher.dealer(rcvhwm=2)
        slow_replay = asyncio.ensure_future(asyncio.to_thread(replay, slow, 1, 0.002))
        waits_s = []
        for _ in range(50):
            began_s = time.monotonic()
            publisher.scheduler.offer()
            await asyncio.to_thread(receive, live)
            waits_s.append(time.monotonic() - began_s)
            await asyncio.sleep(0.01)
        assert not slow_replay.done()
        assert sorted(waits_s)[25] < 0.05
        got = await slow_replay
        assert [number for number, _ in got][:1024] == list(range(1, 1025))
        assert got[-1][0] >= start
        assert publisher.metric("replay_batches_overtaken_total") == 0


async def test_a_reader_that_takes_nothing_is_given_up() -> None:
    async with running_publisher(replay_stall_s=0.2, replay_readers=1) as publisher:
        big = msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared", "pad": "x" * 100_000}], 0])
        for _ in range(400):
            publisher.scheduler.offer(big)
        await publisher.published(401)
        stuck = publisher.dealer(rcvhwm=2)
        stuck.send_multipart([b"", b""])
        await until(lambda: publisher.metric("replay_readers") == 1)
        turned_away = publisher.dealer()
        turned_away.send_multipart([b"", b""])
        await until(lambda: publisher.metric("replays_total", outcome="refused") == 1)
        await until(lambda: publisher.metric("replays_given_up_total") == 1)
        assert len(await asyncio.to_thread(replay, publisher.dealer(), 0)) == 401


async def test_a_stopped_subscriber_and_a_queue_of_one_stall_nobody() -> None:
    """The scheduler never waits, what gets lost leaves a gap and is counted, and a replay resynchronises."""
    async with running_publisher(events={"hwm": 1, "max_queue_size": 1}) as publisher:
        stopped = publisher.subscriber()
        stopped.rcvhwm = 1
        await asyncio.sleep(0.2)
        big = msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared", "pad": "x" * 500_000}], 0])
        waits_s = []
        for _ in range(64):
            began_s = time.monotonic()
            publisher.scheduler.offer(big)
            waits_s.append(time.monotonic() - began_s)
        # Copying half a megabyte is most of it; one may meet a busy machine, none may wait for a reader.
        assert sorted(waits_s)[32] < 0.005
        assert max(waits_s) < 1
        await publisher.published(65)
        numbers = []
        stopped.rcvtimeo = 300
        try:
            while True:
                numbers.append((await asyncio.to_thread(receive, stopped))[1])
        except zmq.Again:
            pass
        assert len(numbers) < 64, "nothing was lost, so this shows nothing"
        got = await asyncio.to_thread(replay, publisher.dealer(), 0)
        assert [number for number, _ in got] == list(range(65))


async def test_a_gap_on_the_way_in_is_a_gap_on_the_way_out() -> None:
    """Of a source that does not tell its state: cleared, and on with what comes."""
    async with running_publisher(state_timeout_s=0.1) as publisher:
        publisher.scheduler.offer()
        publisher.scheduler.sequence += 3
        publisher.scheduler.offer()
        await publisher.published(7)
        got = await asyncio.to_thread(replay, publisher.dealer(), 0)
        assert [number for number, _ in got] == [0, 1, 5, 6]
        assert [events_of(batch) for _, batch in got[2:]] == [CLEARED, events_of(payload(4))]
        assert (await publisher.status()).dropped_batches == 3
        assert publisher.metric("batches_dropped_total", cause="upstream") == 3
        await until(lambda: publisher.metric("complete") == 0)


async def test_a_new_scheduler_is_announced_as_cleared() -> None:
    async with running_publisher() as publisher:
        publisher.scheduler.offer()
        publisher.scheduler.offer()
        await publisher.published(3)
        publisher.scheduler.epoch, publisher.scheduler.sequence = b"n" * 16, 0
        publisher.scheduler.offer()
        await publisher.published(5)
        got = await asyncio.to_thread(replay, publisher.dealer(), 3)
        assert [number for number, _ in got] == [3, 4]
        assert events_of(got[0][1]) == CLEARED
        assert got[1][1] == payload(0)


async def test_a_repeat_is_left_out() -> None:
    async with running_publisher() as publisher:
        for sequence in (0, 1, 1, 0, 2):
            publisher.scheduler.sequence = sequence
            publisher.scheduler.offer()
        await publisher.published(4)
        assert publisher.metric("duplicates_total") == 2


async def test_a_publisher_begins_at_0_with_cleared_and_shows_what_it_missed_and_nobody_told() -> None:
    async with running_publisher(state_timeout_s=0.1) as publisher:
        # The scheduler had sent 7 batches to the one before.
        publisher.scheduler.sequence = 7
        publisher.scheduler.offer()
        await publisher.published(10)
        got = await asyncio.to_thread(replay, publisher.dealer(), 0)
        assert [number for number, _ in got] == [0, 8, 9]
        assert [events_of(batch) for _, batch in got[:2]] == [CLEARED, CLEARED]


async def test_malformed_intake_is_counted_and_ends_nothing() -> None:
    async with running_publisher() as publisher:
        (good, _) = batch_frames(b"e" * 16, 0, b"")
        other = msgspec.msgpack.encode([INTAKE_VERSION + 97, "batch", b"e" * 16, 0])
        for frames in (
            [b""],
            [b"", b""],
            [good],
            [good, b""],
            [good, b"not a batch"],
            [good, payload(0), b"more"],
            [b"\xc1", payload(0)],
            [other, payload(0)],
            batch_frames(b"e" * 16, 2**60, payload(0)),
            batch_frames(b"e" * 65, 0, payload(0)),
            batch_frames(b"e" * 16, -1, payload(0)),
            [msgspec.msgpack.encode(SourceHeader(INTAKE_VERSION, SourceKind.STATE, b"e", 0)), payload(0)],
            [msgspec.msgpack.encode([INTAKE_VERSION, "nonsense", b"e", 0]), payload(0)],
        ):
            publisher.scheduler.socket.send_multipart(frames)
        publisher.scheduler.offer()
        await publisher.published(2)
        assert publisher.metric("malformed_total", socket="intake") == 12
        assert publisher.metric("version_refused_total") == 1


async def test_an_idle_stream_beats_and_silence_pushes_nothing_out() -> None:
    async with running_publisher(events={"buffer_steps": 4}, heartbeat_s=0.02) as publisher:
        publisher.scheduler.offer()
        await until(lambda: publisher.metric("batches_total", kind="heartbeat") >= 12)
        publisher.scheduler.offer()
        await until(lambda: publisher.metric("batches_total", kind="events") == 2)
        dealer = publisher.dealer()
        got = await asyncio.to_thread(replay, dealer, 0)
        numbers = [number for number, _ in got]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert len(numbers) > 12
        with_events = [batch for _, batch in got if events_of(batch)]
        assert payload(0) in with_events
        assert payload(1) in with_events
        assert all(msgspec.msgpack.decode(batch)[2] == 0 for _, batch in got)
        # From the middle of a silence as well.
        again = await asyncio.to_thread(replay, dealer, numbers[5])
        assert [number for number, _ in again][: len(numbers) - 5] == numbers[5:]


async def test_replays_in_the_older_form_have_no_topic() -> None:
    async with running_publisher(replay_topic=False) as publisher:
        publisher.scheduler.offer()
        await publisher.published(2)
        dealer = publisher.dealer()
        dealer.send_multipart([b"", b""])
        messages = [await asyncio.to_thread(dealer.recv_multipart) for _ in range(3)]
        assert [frames[:2] for frames in messages] == [
            [b"", (0).to_bytes(8, "big")],
            [b"", (1).to_bytes(8, "big")],
            [b"", END],
        ]
        assert messages[1][2:] == [payload(0)]
        assert messages[2][2:] == [b""]


async def test_array_events_and_a_missing_rank_are_written_here() -> None:
    async with running_publisher(event_form="array", data_parallel_rank=3) as publisher:
        publisher.scheduler.offer(encode_batch(KvEventBatch(1.5, (stored(1, 2),))))
        await publisher.published(2)
        got = await asyncio.to_thread(replay, publisher.dealer(), 0)
        assert events_of(got[0][1]) == [["AllBlocksCleared"]]
        ts, events, rank = msgspec.msgpack.decode(got[1][1])
        assert (ts, rank) == (1.5, 3)
        assert events[0][:5] == ["BlockStored", [1, 2], None, [10, 11, 12, 13, 20, 21, 22, 23], 4]
        assert decode_batch(got[1][1]).events == (stored(1, 2),)


async def test_ranks_have_their_own_ports() -> None:
    # A free base port, and the port of rank 2 above it.
    async with running_publisher() as probe:
        base = int(probe.app.sockets.events_endpoint.rpartition(":")[2])
    events = {"endpoint": f"tcp://127.0.0.1:{base}", "replay_endpoint": f"tcp://127.0.0.1:{base + 100}"}
    async with running_publisher(events=events, data_parallel_rank=2, data_parallel_size=4) as publisher:
        status = await publisher.status()
        assert status.events_endpoint == f"tcp://127.0.0.1:{base + 2}"
        assert status.replay_endpoint == f"tcp://127.0.0.1:{base + 102}"
        got = await asyncio.to_thread(replay, publisher.dealer(), 0)
        assert msgspec.msgpack.decode(got[0][1])[2] == 2


async def test_a_publisher_that_connects_feeds_a_subscriber_that_binds() -> None:
    context = zmq.Context()
    indexer = context.socket(zmq.SUB)
    indexer.linger = 0
    indexer.subscribe("kv@")
    indexer.rcvtimeo = 5000
    port = indexer.bind_to_random_port("tcp://127.0.0.1")
    try:
        async with running_publisher(
            events={"endpoint": f"tcp://127.0.0.1:{port}"}, bind="auto", heartbeat_s=0.1
        ):
            topic, _, batch = await asyncio.to_thread(receive, indexer)
            assert topic == TOPIC.encode()
            assert isinstance(batch, list)
    finally:
        indexer.close()
        context.term()
