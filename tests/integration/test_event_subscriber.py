"""The subscriber library against a real publisher that a real KV cache manager feeds."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import zmq

from reprise_core.kv_events import BlockRemoved, BlockStored
from reprise_wire.event_facts import EventFacts, Fact
from reprise_wire.event_source import EventSource
from reprise_wire.event_source_values import Delivery, DeliveryKind, Notice, SourceOptions, SourceState
from reprise_wire.event_subscriber import EventSubscriber
from reprise_wire.source_sockets import ClientKeys, SourceAddress
from support.event_feeder import EventFeeder, fed_publisher, published
from support.event_followers import FollowerProcess, digest
from support.publisher_harness import RunningPublisher
from support.waiting import until

OPTIONS = SourceOptions(answer_s=3, backoff_s=0.05, retry_s=1)


class Following:
    """A subscriber with an index, run by this test's loop."""

    def __init__(
        self,
        publisher: RunningPublisher,
        options: SourceOptions = OPTIONS,
        keys: ClientKeys | None = None,
    ) -> None:
        assert publisher.app.sockets is not None
        self.publisher = publisher
        self.facts = EventFacts()
        self.kinds: list[DeliveryKind] = []
        self.notices: list[Notice] = []
        self.states: list[SourceState] = []
        self.subscriber = EventSubscriber(
            on_delivery=self._take,
            on_notice=self.notices.append,
            on_state=lambda name, was, state: self.states.append(state),
        )
        sockets = publisher.app.sockets
        address = SourceAddress("e0", sockets.events_endpoint, sockets.replay_endpoint, "kv@", keys)
        self.source: EventSource = self.subscriber.add(address, options)

    def _take(self, delivery: Delivery) -> None:
        self.kinds.append(delivery.kind)
        self.facts.apply(delivery)

    @property
    def is_level(self) -> bool:
        """Exact, and at the publisher's last number."""
        assert self.publisher.app.sockets is not None
        last = self.publisher.app.sockets.stream.next_sequence - 1
        return self.source.state is SourceState.EXACT and self.source.sequence == last


@asynccontextmanager
async def following(
    publisher: RunningPublisher, options: SourceOptions = OPTIONS, keys: ClientKeys | None = None
) -> AsyncIterator[Following]:
    follower = Following(publisher, options, keys)
    running = asyncio.ensure_future(follower.subscriber.run())
    try:
        yield follower
        assert not running.done(), running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        follower.subscriber.close()


async def level(follower: Following, feeder: EventFeeder) -> None:
    await published(follower.publisher, feeder)
    await until(lambda: follower.is_level, 30)


async def feed(feeder: EventFeeder, steps: int) -> None:
    for _ in range(steps):
        feeder.step()
        await asyncio.sleep(0)


def seeded() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


async def test_a_late_joiner_takes_the_snapshot_and_goes_on() -> None:
    async with fed_publisher(seeded(), host_blocks=300) as (publisher, feeder):
        await feed(feeder, 60)
        async with following(publisher) as follower:
            await feed(feeder, 60)
            await level(follower, feeder)
            assert follower.facts.copies("e0") == feeder.workload.truth()
            assert DeliveryKind.SNAPSHOT in follower.kinds
            # The first live batches after the snapshot may come by the replay that proves them.
            await feed(feeder, 60)
            await level(follower, feeder)
            await until(lambda: follower.source.is_following)
            assert follower.facts.copies("e0") == feeder.workload.truth()
            num_gaps = follower.source.counters.gaps
            await feed(feeder, 60)
            await level(follower, feeder)
            assert follower.facts.copies("e0") == feeder.workload.truth()
            assert follower.kinds[-1] is DeliveryKind.LIVE
            assert follower.source.counters.gaps == num_gaps
            assert follower.source.counters.snapshots == 1
            assert follower.states[-1] is SourceState.EXACT


async def test_without_snapshots_it_replays_from_the_beginning() -> None:
    async with fed_publisher(seeded()) as (publisher, feeder):
        await feed(feeder, 60)
        options = SourceOptions(snapshots=False)
        async with following(publisher, options) as follower:
            await feed(feeder, 60)
            await level(follower, feeder)
            assert follower.facts.copies("e0") == feeder.workload.truth()
            assert follower.kinds[0] is DeliveryKind.REPLAY


async def test_without_snapshots_and_past_the_ring_it_is_partial_until_a_reset() -> None:
    async with fed_publisher(seeded(), events={"buffer_steps": 10}) as (publisher, feeder):
        await feed(feeder, 60)
        await published(publisher, feeder)
        async with following(publisher, SourceOptions(snapshots=False)) as follower:
            await until(lambda: follower.source.is_following)
            assert follower.source.state is SourceState.PARTIAL
            # A late joiner knows a part of the truth, and nothing beyond it.
            assert follower.facts.copies("e0") <= feeder.workload.truth()
            feeder.reset()
            await feed(feeder, 5)
            await level(follower, feeder)
            assert follower.facts.copies("e0") == feeder.workload.truth()


async def test_silence_is_off_and_the_next_batch_goes_on() -> None:
    async with fed_publisher(seeded()) as (publisher, feeder):
        await feed(feeder, 20)
        options = SourceOptions(silence_s=0.3, drop_after_s=0.3)
        async with following(publisher, options) as follower:
            await level(follower, feeder)
            await until(lambda: follower.source.state is SourceState.OFF)
            assert follower.facts.num_blocks("e0") > 0
            await until(lambda: follower.facts.num_blocks("e0") == 0)
            assert follower.source.counters.drops == 1
            await feed(feeder, 5)
            await level(follower, feeder)
            assert follower.facts.copies("e0") == feeder.workload.truth()


async def test_one_subscriber_follows_many_and_lets_them_go() -> None:
    async with fed_publisher(seeded()) as (first, one), fed_publisher(seeded()) as (second, two):
        await feed(one, 30)
        await feed(two, 30)
        async with following(first) as follower:
            assert second.app.sockets is not None
            sockets = second.app.sockets
            other = follower.subscriber.add(
                SourceAddress("e1", sockets.events_endpoint, sockets.replay_endpoint), OPTIONS
            )
            await published(second, two)
            await until(lambda: other.sequence == sockets.stream.next_sequence - 1, 30)
            assert other.state is SourceState.EXACT
            await level(follower, one)
            assert follower.facts.copies("e0") == one.workload.truth()
            assert follower.facts.copies("e1") == two.workload.truth()
            follower.subscriber.remove("e1")
            follower.facts.drop("e1")
            await feed(one, 10)
            await feed(two, 10)
            await level(follower, one)
            assert follower.facts.copies("e0") == one.workload.truth()
            assert follower.facts.num_blocks("e1") == 0


async def test_with_curve_only_an_allowed_key_is_served(tmp_path: Path) -> None:
    server_public, server_secret = zmq.curve_keypair()
    public, secret = zmq.curve_keypair()
    (tmp_path / "secret").write_bytes(server_secret)
    (tmp_path / "allowed").write_bytes(public)
    settings = {
        "curve_secret_key_file": str(tmp_path / "secret"),
        "curve_allowed_keys_file": str(tmp_path / "allowed"),
    }
    async with fed_publisher(seeded(), **settings) as (publisher, feeder):
        await feed(feeder, 20)
        stranger = ClientKeys(server_public, *zmq.curve_keypair())
        async with (
            following(publisher, keys=ClientKeys(server_public, public, secret)) as follower,
            following(publisher, keys=stranger) as refused,
        ):
            await level(follower, feeder)
            assert follower.facts.copies("e0") == feeder.workload.truth()
            assert refused.source.state is SourceState.OFF
            assert refused.kinds == []


async def test_one_that_was_stopped_and_lost_batches_catches_up(tmp_path: Path) -> None:
    """More than all buffers on the way hold, and more than the ring keeps."""
    events = {"hwm": 10, "buffer_steps": 20}
    async with fed_publisher(seeded(), events=events, heartbeat_s=0.3) as (publisher, feeder):
        sockets = publisher.app.sockets
        assert sockets is not None
        ports = (int(end.rpartition(":")[2]) for end in (sockets.events_endpoint, sockets.replay_endpoint))
        follower = FollowerProcess(*ports, tmp_path)
        try:
            async with asyncio.timeout(60):
                while not (await follower.report()).is_exact:
                    await asyncio.sleep(0.05)
            feeder.send([large_store(-2)])
            # With it the live connection is proven, so that what is lost shows as a gap.
            async with asyncio.timeout(60):
                while (await follower.report()).digest != digest(facts_of(feeder)):
                    await asyncio.sleep(0.05)
            follower.freeze()
            for number in range(400):
                old = BlockRemoved(block_hashes=large_store(number - 2).block_hashes, medium="GPU")
                feeder.send([large_store(number), *([old] if number % 10 else [])])
                await asyncio.sleep(0)
            await published(publisher, feeder)
            follower.thaw()
            truth = digest(facts_of(feeder))
            async with asyncio.timeout(60):
                while (report := await follower.report()).digest != truth or not report.is_exact:
                    await asyncio.sleep(0.1)
            # On a slow machine the stop outlasts the connection's own heartbeat.
            assert report.counters["gaps"] + report.counters["connections_lost"] > 0
            assert report.counters["snapshots"] > 1
        finally:
            follower.close()


def large_store(number: int) -> BlockStored:
    """80 KB of token ids."""
    return BlockStored(
        block_hashes=tuple(range(16 * number + 100, 16 * number + 116)),
        parent_block_hash=None,
        token_ids=(2**31,) * (16 * 1024),
        block_size=1024,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
    )


def facts_of(feeder: EventFeeder) -> Counter[Fact]:
    facts: Counter[Fact] = Counter()
    for state in feeder.sender.record.freeze().stores(64):
        facts.update(Fact(block_hash, 0, "GPU") for block_hash in state.event.block_hashes)
    return facts
