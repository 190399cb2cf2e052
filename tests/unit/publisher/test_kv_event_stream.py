"""Sequencing of the gRPC event stream: history, live batches, snapshots, and readers that are too slow."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from prometheus_client import CollectorRegistry
from smg_grpc_proto.generated import common_pb2 as pb

from reprise_core.errors import Exhausted
from reprise_core.kv_events import AllBlocksCleared, BlockStored, KvEvent, KvEventBatch
from reprise_publisher.kv_event_feed import BASE_SHIFT, HANDOVER_BATCHES, FeedOptions, KvEventFeed, OnBatch
from reprise_publisher.kv_event_rpc import KvEventServicer
from reprise_publisher.metrics import PublisherMetrics
from reprise_wire.event_codec import encode_batch
from support.waiting import until

NOW_S = 1_700_000_000.0
BASE = int(NOW_S * 1000) << BASE_SHIFT


def stored(block_hash: int, parent: int | None = None, tokens: tuple[int, ...] = (1, 2)) -> BlockStored:
    return BlockStored(
        block_hashes=(block_hash,),
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )


@dataclass(frozen=True)
class Told:
    event: BlockStored
    resolved: bool = True


@dataclass(frozen=True)
class State:
    told: tuple[Told, ...] = ()

    @property
    def num_copies(self) -> int:
        return sum(len(told.event.block_hashes) for told in self.told)

    def stores(self, blocks_per_event: int) -> Iterator[Told]:
        assert blocks_per_event >= 1
        return iter(self.told)


@dataclass
class Source:
    """A stream without sockets; `publish` may leave numbers out."""

    kept: list[tuple[int, bytes]] = field(default_factory=list)
    state: State = State()
    complete: bool = True
    last_sequence: int = -1
    callbacks: list[OnBatch] = field(default_factory=list)

    def publish(self, *events: KvEvent, lost: int = 0) -> None:
        self.last_sequence += 1 + lost
        batch = KvEventBatch(1.0, events, 0)
        payload = encode_batch(batch)
        self.kept.append((self.last_sequence, payload))
        for callback in list(self.callbacks):
            callback(self.last_sequence, payload, batch)

    def freeze_now(self) -> tuple[int, State, bool]:
        return self.last_sequence, self.state, self.complete

    def subscribe(self, callback: OnBatch) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def published_after(self, sequence: int) -> Sequence[tuple[int, bytes]]:
        return [kept for kept in self.kept if kept[0] > sequence]


class Call:
    """A server's side of one call, and the reader at its other end, who may stop reading."""

    def __init__(self) -> None:
        self.got: list[pb.KvEventBatch] = []
        self.metadata_first = False
        self.reading = asyncio.Event()
        self.reading.set()
        self.status: tuple[grpc.StatusCode, str] | None = None

    async def send_initial_metadata(self, metadata: object) -> None:
        self.metadata_first = not self.got

    async def write(self, message: pb.KvEventBatch) -> None:
        await self.reading.wait()
        self.got.append(message)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.status = code, details
        raise asyncio.CancelledError

    @property
    def numbers(self) -> list[int]:
        return [message.sequence_number - BASE for message in self.got]


class World:
    def __init__(self, **options: int) -> None:
        self.source = Source()
        self.registry = CollectorRegistry()
        self.metrics = PublisherMetrics(self.registry)
        limits = {"readers": 2, "queue_batches": 8, "queue_bytes": 10_000, **options}
        self.feed = KvEventFeed(self.source, FeedOptions(rank=0, **limits), self.metrics, clock=lambda: NOW_S)
        self.servicer = KvEventServicer(self.feed, self.metrics, stall_s=5.0)

    def snapshots(self, cause: str) -> float:
        return self.registry.get_sample_value("reprise_publisher_rpc_snapshots_total", {"cause": cause}) or 0

    @asynccontextmanager
    async def reader(self, start: int = 0, *, reading: bool = True) -> AsyncIterator[Call]:
        call = Call()
        if not reading:
            call.reading.clear()
        request = pb.SubscribeKvEventsRequest(start_sequence_number=start)
        task = asyncio.ensure_future(self.servicer.SubscribeKvEvents(request, call))  # type: ignore[arg-type]
        try:
            yield call
        finally:
            task.cancel()
            results = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(results[0], asyncio.CancelledError), results


async def test_a_fresh_reader_gets_the_state_and_then_what_comes() -> None:
    world = World()
    for number in range(3):
        world.source.publish(stored(number))
    world.source.state = State((Told(stored(1)), Told(stored(2, 1))))
    async with world.reader() as call:
        await until(lambda: len(call.got) == 1)
        world.source.publish(stored(9, 2))
        world.source.publish()
        await until(lambda: len(call.got) == 3)
    assert call.metadata_first
    assert call.numbers == [2, 3, 4]
    first, second, beat = call.got
    assert (first.snapshot.index, first.snapshot.count, first.snapshot.blocks) == (0, 1, 2)
    assert first.snapshot.unknown_before == 0
    assert [event.WhichOneof("data") for event in first.events] == ["cleared", "stored", "stored"]
    assert [event.event_id for event in first.events] == [0, 0, 0]
    assert not second.HasField("snapshot")
    assert second.events[0].event_id > 0
    assert not beat.events
    assert world.snapshots("fresh") == 1


async def test_an_empty_state_is_a_snapshot_too() -> None:
    world = World()
    world.source.publish(AllBlocksCleared())
    async with world.reader() as call:
        await until(lambda: len(call.got) == 1)
    assert call.numbers == [0]
    assert [event.WhichOneof("data") for event in call.got[0].events] == ["cleared"]


async def test_a_state_that_is_known_in_part_says_so() -> None:
    world = World()
    world.source.publish()
    world.source.complete = False
    async with world.reader() as call:
        await until(lambda: len(call.got) == 1)
        assert call.got[0].snapshot.unknown_before > 0
        world.source.publish(stored(1))
        await until(lambda: len(call.got) == 2)
        world.source.complete = True
        world.source.publish()
        await until(lambda: len(call.got) == 4)
    assert [message.HasField("snapshot") for message in call.got] == [True, False, False, True]
    assert call.got[3].snapshot.unknown_before == 0
    assert world.snapshots("completed") == 1


async def test_a_reader_goes_on_from_its_cursor() -> None:
    world = World()
    for number in range(5):
        world.source.publish(stored(number))
    async with world.reader(BASE + 2) as call:
        await until(lambda: len(call.got) == 2)
        world.source.publish(stored(7))
        await until(lambda: len(call.got) == 3)
    assert call.numbers == [3, 4, 5]
    assert not any(message.HasField("snapshot") for message in call.got)


async def test_event_ids_of_history_are_those_of_the_live_stream() -> None:
    world = World()
    world.source.publish()
    async with world.reader() as live:
        await until(lambda: len(live.got) == 1)
        world.source.publish(stored(1), stored(2))
        await until(lambda: len(live.got) == 2)
    async with world.reader(BASE) as again:
        await until(lambda: len(again.got) == 1)
    assert again.got[0].events == live.got[1].events


@pytest.mark.parametrize(
    ("cursor", "cause"),
    [
        (3, "foreign"),
        (BASE - 1, "foreign"),
        (BASE + 5, "foreign"),
        (BASE + 100, "foreign"),
        (BASE + 1, "behind"),
    ],
)
async def test_a_cursor_that_cannot_be_continued_takes_a_snapshot(cursor: int, cause: str) -> None:
    world = World()
    for number in range(5):
        world.source.publish(stored(number))
    del world.source.kept[:3]
    async with world.reader(cursor) as call:
        await until(lambda: len(call.got) == 1)
    assert call.numbers == [4]
    assert call.got[0].HasField("snapshot")
    assert world.snapshots(cause) == 1


async def test_a_hole_in_the_history_takes_a_snapshot() -> None:
    world = World()
    world.source.publish(stored(0))
    world.source.publish(stored(1), lost=2)
    async with world.reader(BASE) as call:
        await until(lambda: len(call.got) == 1)
    assert call.got[0].HasField("snapshot")


async def test_a_gap_in_the_live_stream_takes_a_snapshot() -> None:
    world = World()
    world.source.publish()
    async with world.reader() as call:
        await until(lambda: len(call.got) == 1)
        world.source.publish(stored(5), lost=3)
        await until(lambda: len(call.got) == 2)
        world.source.publish(stored(6))
        await until(lambda: len(call.got) == 3)
    assert call.numbers == [0, 4, 5]
    assert [message.HasField("snapshot") for message in call.got] == [True, True, False]
    assert world.snapshots("gap") == 1


async def test_a_snapshot_in_chunks_ends_at_the_states_number() -> None:
    world = World()
    world.source.publish()
    big = tuple(range(2**31, 2**31 + 64 * 1024))
    world.source.state = State(
        tuple(Told(msg(number, number - 1 if number else None, big)) for number in range(7))
    )
    async with world.reader() as call:
        await until(lambda: len(call.got) == 7)
    assert call.numbers == [-6, -5, -4, -3, -2, -1, 0]
    assert [message.snapshot.index for message in call.got] == list(range(7))
    assert {message.snapshot.count for message in call.got} == {7}
    kinds = [[event.WhichOneof("data") for event in message.events] for message in call.got]
    assert kinds == [["cleared", "stored"], *[["stored"]] * 6]
    # A reader that comes back with the number of a chunk has not all of the state.
    world.source.state = State()
    async with world.reader(BASE - 1) as again:
        await until(lambda: len(again.got) == 1)
    assert again.got[0].HasField("snapshot")
    async with world.reader(BASE) as whole:
        world.source.publish()
        await until(lambda: len(whole.got) == 1)
    assert not whole.got[0].HasField("snapshot")


def msg(block_hash: int, parent: int | None, tokens: tuple[int, ...]) -> BlockStored:
    return BlockStored(
        block_hashes=(block_hash,),
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=len(tokens),
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )


async def test_a_cursor_within_the_numbers_of_chunks_is_not_taken_for_a_batchs() -> None:
    world = World()
    for number in range(20):
        world.source.publish(stored(number))
    world.feed.note_snapshot(BASE + 10, BASE + 15)
    assert world.feed.history(BASE + 12) == ((), "partial")
    assert world.feed.history(BASE + 15)[1] == ""
    for first in range(16, 2000, 2):
        world.feed.note_snapshot(BASE + first, BASE + first + 1)
    assert world.feed.history(BASE + 12) == ((), "partial")


async def test_a_reader_that_is_too_slow_gets_a_snapshot_for_what_it_missed() -> None:
    world = World()
    world.source.publish()
    async with world.reader() as call:
        await until(lambda: len(call.got) == 1)
        call.reading.clear()
        for number in range(30):
            world.source.publish(stored(number))
            await asyncio.sleep(0)
        call.reading.set()
        await until(lambda: world.snapshots("slow") == 1)
        world.source.publish(stored(99))
        await until(lambda: call.numbers[-1] == 31)
    assert call.got[-2].HasField("snapshot")
    assert call.numbers[-2:] == [30, 31]


async def test_bytes_are_a_limit_too() -> None:
    world = World(queue_batches=1000, queue_bytes=500)
    world.source.publish()
    async with world.reader() as call:
        await until(lambda: len(call.got) == 1)
        call.reading.clear()
        for number in range(5):
            world.source.publish(stored(number, tokens=(70_000, 70_000) * 20))
            await asyncio.sleep(0)
        assert world.feed.options.queue_bytes == 500
        world.source.publish(*(stored(number) for number in range(50)))
        await asyncio.sleep(0.01)
        call.reading.set()
        await until(lambda: world.snapshots("slow") >= 1)


async def test_one_slow_reader_costs_the_others_nothing() -> None:
    world = World()
    world.source.publish()
    async with world.reader() as slow, world.reader() as quick:
        await until(lambda: len(slow.got) == len(quick.got) == 1)
        slow.reading.clear()
        for number in range(30):
            world.source.publish(stored(number))
            await until(lambda: len(quick.got) == number + 2)  # noqa: B023 (awaited at once)
    assert quick.numbers == list(range(31))


async def test_a_reader_that_takes_nothing_is_ended() -> None:
    world = World()
    world.servicer = KvEventServicer(world.feed, world.metrics, stall_s=0.02)
    world.source.publish()
    async with world.reader(reading=False) as call:
        await until(lambda: call.status is not None)
    assert call.status is not None
    assert call.status[0] is grpc.StatusCode.UNAVAILABLE
    assert not world.source.callbacks


async def test_readers_have_a_limit() -> None:
    world = World()
    one, other = world.feed.attach(), world.feed.attach()
    with pytest.raises(Exhausted):
        world.feed.attach()
    world.feed.detach(one)
    assert len(world.source.callbacks) == 1
    world.feed.detach(other)
    assert not world.source.callbacks


async def test_a_full_hand_over_shows_as_a_gap() -> None:
    world = World(queue_batches=10**6, queue_bytes=10**9)
    world.source.publish()
    async with world.reader() as call:
        await until(lambda: len(call.got) == 1)
        for _ in range(HANDOVER_BATCHES + 50):  # no turn of the loop in between
            world.source.publish()
        await until(lambda: call.numbers[-1] == HANDOVER_BATCHES)
        world.source.publish()
        await until(lambda: world.snapshots("gap") == 1)
        await until(lambda: call.numbers[-1] == HANDOVER_BATCHES + 51)
    assert world.registry.get_sample_value("reprise_publisher_rpc_batches_dropped_total") == 50


async def test_where_it_is_not_offered_the_answer_is_final() -> None:
    world = World()
    world.servicer = KvEventServicer(None, world.metrics, reason="CURVE is on")
    async with world.reader() as call:
        await until(lambda: call.status is not None)
    assert call.status == (grpc.StatusCode.UNIMPLEMENTED, "CURVE is on")


async def test_history_that_lacks_tokens_takes_a_snapshot() -> None:
    world = World()
    world.source.publish(stored(1))
    world.source.publish(stored(1, tokens=()))
    async with world.reader(BASE) as call:
        await until(lambda: len(call.got) == 1)
    assert call.got[0].HasField("snapshot")
    assert world.snapshots("untellable") == 1


async def test_a_live_store_that_lacks_tokens_is_left_out_and_counted() -> None:
    world = World()
    world.source.publish()
    async with world.reader() as call:
        await until(lambda: len(call.got) == 1)
        world.source.publish(stored(1), stored(1, tokens=()))
        await until(lambda: len(call.got) == 2)
    assert len(call.got[1].events) == 1
    labels = {"cause": "no_tokens"}
    assert world.registry.get_sample_value("reprise_publisher_rpc_events_left_out_total", labels) == 1


async def test_what_hangs_below_an_unknown_block_is_left_out_of_a_snapshot() -> None:
    world = World()
    world.source.publish()
    world.source.state = State(
        (
            Told(stored(1)),
            Told(stored(5, 4), resolved=False),
            Told(stored(6, 5)),
            Told(stored(2, 1)),
            Told(stored(7, 6)),
        )
    )
    async with world.reader() as call:
        await until(lambda: len(call.got) == 1)
    told = [event.stored.blocks[0].block_hash for event in call.got[0].events[1:]]
    assert told == [1, 2]
