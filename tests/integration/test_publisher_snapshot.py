"""Snapshots over the replay socket, as a plain DEALER sees them."""

import asyncio
import time

import msgspec
import zmq

from reprise_core.block_record import BlockRecord
from reprise_core.kv_events import AllBlocksCleared
from reprise_wire.event_codec import decode_batch
from support.event_source import facts_of, removed, stored
from support.publisher_harness import TOPIC, RunningPublisher, running_publisher
from support.waiting import until

REQUEST = [b"", b"snapshot", msgspec.msgpack.encode({"version": 1})]


def read_all(socket: zmq.Socket) -> list[tuple[dict, tuple]]:
    """Meta and events of each chunk."""
    chunks: list[tuple[dict, tuple]] = []
    while not chunks or not chunks[-1][0]["last"]:
        empty, mark, meta, payload = socket.recv_multipart()
        assert (empty, mark) == (b"", b"snapshot")
        chunks.append((msgspec.msgpack.decode(meta), decode_batch(payload).events))
    return chunks


async def snapshot(publisher: RunningPublisher) -> list[tuple[dict, tuple]]:
    socket = publisher.dealer()
    socket.send_multipart(REQUEST)
    return await asyncio.to_thread(read_all, socket)


async def test_nothing_yet_is_not_complete() -> None:
    async with running_publisher() as publisher:
        ((meta, events),) = await snapshot(publisher)
        assert meta == {
            "version": 1,
            "topic": TOPIC,
            "rank": 0,
            "index": 0,
            "last": True,
            "sequence": 0,
            "num_blocks": 0,
            "num_unresolved": 0,
            "complete": False,
            "unresolved": [],
        }
        assert events == (AllBlocksCleared(),)


async def test_a_foreign_scheduler_s_blocks_parents_first_and_what_is_unknown_said() -> None:
    async with running_publisher(data_parallel_rank=1) as publisher:
        scheduler = publisher.scheduler
        scheduler.offer_events(stored(2), stored(1, 3))
        scheduler.offer_events(stored(5, parent=3), stored(5, parent=3), stored(2, medium="CPU"))
        scheduler.offer_events(stored(8, parent=4), removed(2))
        await publisher.published(4)
        ((meta, events),) = await snapshot(publisher)
        assert {
            name: meta[name] for name in ("sequence", "num_blocks", "num_unresolved", "complete", "rank")
        } == {
            "sequence": 3,
            "num_blocks": 5,
            "num_unresolved": 1,
            "complete": True,
            "rank": 1,
        }
        assert [events[i].block_hashes for i in meta["unresolved"]] == [(8,)]
        told: set[object] = {None}
        for event in events[1:]:
            assert event.parent_block_hash in told or event.block_hashes == (8,)
            told.update(event.block_hashes)
        copies = sorted((h, e.medium) for e in events[1:] for h in e.block_hashes)
        assert copies == [(1, "GPU"), (2, "CPU"), (3, "GPU"), (5, "GPU"), (5, "GPU"), (8, "GPU")]


async def test_other_versions_and_readers_too_many_get_a_reason() -> None:
    async with running_publisher(snapshot_readers=1, replay_stall_s=0.3) as publisher:
        dealer = publisher.dealer()
        dealer.send_multipart([b"", b"snapshot", msgspec.msgpack.encode({"version": 9})])
        frames = await asyncio.to_thread(dealer.recv_multipart)
        assert msgspec.msgpack.decode(frames[2]) == {
            "version": 1,
            "error": "version 9, this publisher speaks 1",
        }
        assert (frames[0], frames[1], frames[3]) == (b"", b"snapshot", b"")
        for i in range(400):
            publisher.scheduler.offer_events(stored(*range(1000 * i + 1, 1000 * i + 500)))
        await publisher.published(401)
        stuck = publisher.dealer(rcvhwm=1)
        stuck.send_multipart(REQUEST)
        await until(lambda: publisher.metric("snapshot_readers") == 1)
        dealer.send_multipart(REQUEST)
        frames = await asyncio.to_thread(dealer.recv_multipart)
        assert msgspec.msgpack.decode(frames[2])["error"].startswith("busy: 1 snapshots")
        await until(lambda: publisher.metric("snapshots_total", outcome="given_up") == 1)
        dealer.send_multipart(REQUEST)
        assert len(await asyncio.to_thread(read_all, dealer)) > 100


async def test_a_large_snapshot_is_of_one_moment_and_holds_up_nothing_live() -> None:
    async with running_publisher() as publisher:
        expected = BlockRecord(limit_blocks=10**6)
        for i in range(100):
            event = stored(*range(1000 * i + 1, 1000 * i + 401))
            expected.apply(event)
            publisher.scheduler.offer_events(event)
        await publisher.published(101)
        live = publisher.subscriber()
        await asyncio.sleep(0.2)
        reading = asyncio.ensure_future(snapshot(publisher))
        waits_s, sequences = [], []
        while not reading.done() or len(waits_s) < 5:
            began_s = time.monotonic()
            publisher.scheduler.offer_events(removed(len(waits_s) * 1000 + 400))
            frames = await asyncio.to_thread(live.recv_multipart)
            sequences.append(int.from_bytes(frames[1], "big"))
            waits_s.append(time.monotonic() - began_s)
        chunks = await reading
        meta = chunks[-1][0]
        got = BlockRecord(limit_blocks=10**6)
        for _, events in chunks:
            for event in events:
                got.apply(event)
        # What was removed up to the snapshot's number is not in it, what was removed later is.
        for sequence in range(101, meta["sequence"] + 1):
            expected.apply(removed((sequence - 101) * 1000 + 400))
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
        assert len(chunks) > 10
        assert facts_of(got) == facts_of(expected)
        assert sorted(waits_s)[len(waits_s) // 2] < 0.2


async def test_what_must_not_leave_is_not_in_snapshots() -> None:
    async with running_publisher(event_token_ids=False) as publisher:
        publisher.scheduler.offer_events(stored(1, 2))
        await publisher.published(2)
        ((meta, events),) = await snapshot(publisher)
        assert (events[1].block_hashes, events[1].token_ids) == ((1, 2), ())
        assert meta["num_blocks"] == 2


async def test_other_threads_freeze_and_listen() -> None:
    async with running_publisher() as publisher:
        sockets = publisher.app.sockets
        assert sockets is not None
        heard: list[tuple[int, object]] = []
        stop = sockets.subscribe(lambda sequence, payload, batch: heard.append((sequence, batch.events)))
        publisher.scheduler.offer_events(stored(1))
        await publisher.published(2)
        sequence, state, complete = await asyncio.to_thread(sockets.freeze_now)
        assert (sequence, complete, sockets.last_sequence) == (1, True, 1)
        assert [s.event.block_hashes for s in state.stores(10)] == [(1,)]
        await until(lambda: heard == [(1, (stored(1),))])
        stop()
        publisher.scheduler.offer_events(stored(2))
        await publisher.published(3)
        await asyncio.to_thread(sockets.freeze_now)
        assert len(heard) == 1
        assert [number for number, _ in sockets.published_after(0)] == [1, 2]


async def test_ranks_hold_blocks_of_their_own() -> None:
    """llm-d-router#2936: behind one address they became one, and one's removal took the other's block."""
    async with running_publisher() as first, running_publisher(data_parallel_rank=1) as second:
        for publisher in (first, second):
            publisher.scheduler.offer_events(stored(1))
            await publisher.published(2)
        second.scheduler.offer_events(removed(1))
        await second.published(3)
        ((meta, events),) = await snapshot(first)
        assert (meta["rank"], [event.block_hashes for event in events[1:]]) == (0, [(1,)])
        ((meta, events),) = await snapshot(second)
        assert (meta["rank"], events[1:]) == (1, ())
