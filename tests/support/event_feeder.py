"""A scheduler's event side in this process: a cache under load, and the real sender to a publisher."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from reprise_core.kv_events import KvEvent
from reprise_scheduler.adapters.event_sender import EventSender
from reprise_scheduler.metrics import EventMetrics
from support.cache_workload import CacheWorkload
from support.publisher_harness import RunningPublisher, running_publisher
from support.waiting import until


class EventFeeder:
    """Needs a running event loop, as the sender does."""

    def __init__(
        self, intake_endpoint: str, workload: CacheWorkload, *, queue_batches: int = 100_000
    ) -> None:
        self.workload = workload
        self.sender = EventSender(
            intake_endpoint,
            EventMetrics(CollectorRegistry()),
            rank=0,
            queue_batches=queue_batches,
            record_blocks=1_000_000,
        )
        self.sender.start()
        self.num_blocks = 0
        self.unpublished = 0
        """Batches that went out before the publisher had asked for the state, which contains them."""

    def step(self, *, num_requests: int = 4) -> list[KvEvent]:
        return self.send(self.workload.step(num_requests=num_requests))

    def reset(self) -> list[KvEvent]:
        return self.send(self.workload.reset())

    def send(self, events: list[KvEvent]) -> list[KvEvent]:
        if events:
            self.sender.send(events)
            self.num_blocks += sum(len(getattr(event, "block_hashes", ())) for event in events)
        return events

    def close(self) -> None:
        self.sender.close()


@asynccontextmanager
async def fed_publisher(
    rng: random.Random, *, host_blocks: int = 0, num_blocks: int = 400, **settings: object
) -> AsyncIterator[tuple[RunningPublisher, EventFeeder]]:
    async with running_publisher(**settings) as publisher:  # type: ignore[arg-type]
        assert publisher.app.sockets is not None
        workload = CacheWorkload(rng, host_blocks=host_blocks, num_blocks=num_blocks)
        feeder = EventFeeder(publisher.app.sockets.intake_endpoint, workload)
        try:
            await _introduced(publisher, feeder)
            yield publisher, feeder
        finally:
            feeder.close()


async def _introduced(publisher: RunningPublisher, feeder: EventFeeder) -> None:
    """Until the sender is connected, and the publisher has the state that it then asks for: from here on
    every batch sent is a batch published."""
    sockets = publisher.app.sockets
    assert sockets is not None
    async with asyncio.timeout(20):
        while feeder.sender._num_sent == 0:
            feeder.sender.send([])
            await asyncio.sleep(0.01)
    await until(lambda: sockets.stream.next_sequence > 1 and sockets.stream.knows_all, 20)
    feeder.unpublished = int(feeder.sender._num_sent - publisher.metric("batches_total", kind="events"))


async def published(publisher: RunningPublisher, feeder: EventFeeder) -> None:
    """Until all that was sent is published."""
    await until(
        lambda: (
            feeder.sender._num_sent == publisher.metric("batches_total", kind="events") + feeder.unpublished
        ),
        30,
    )
