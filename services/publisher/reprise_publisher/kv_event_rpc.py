"""`vllm.grpc.engine.VllmEngine.SubscribeKvEvents`, as smg's gateway calls it.

A reader that continues where it was gets the batches since; any other one, and one that lost some, gets a
snapshot that replaces what it has. The service's other calls are the scheduler's: here they are
unimplemented.
"""

import asyncio
from collections.abc import Awaitable, Callable
from time import time

import grpc
from smg_grpc_proto.generated import common_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2

from reprise_publisher.kv_event_feed import FeedReader, KvEventFeed
from reprise_publisher.kv_event_snapshot import snapshot_chunks
from reprise_publisher.metrics import PublisherMetrics

SERVICE_NAME = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name
MAX_SNAPSHOTS_AT_ONCE = 4
"""A state in work costs memory; further readers wait for their turn."""

Write = Callable[[pb.KvEventBatch], Awaitable[None]]
Context = grpc.aio.ServicerContext[pb.SubscribeKvEventsRequest, pb.KvEventBatch]


class KvEventServicer:
    """`feed` is None where the stream is not offered, and `reason` says why: that is UNIMPLEMENTED, the one
    answer after which smg does not ask again."""

    def __init__(
        self, feed: KvEventFeed | None, metrics: PublisherMetrics, *, stall_s: float = 30.0, reason: str = ""
    ) -> None:
        self._feed = feed
        self._metrics = metrics
        self._stall_s = stall_s
        self._reason = reason
        self._snapshots = asyncio.Semaphore(MAX_SNAPSHOTS_AT_ONCE)

    def add_to(self, server: grpc.aio.Server) -> None:
        handler = grpc.unary_stream_rpc_method_handler(
            self.SubscribeKvEvents,
            request_deserializer=pb.SubscribeKvEventsRequest.FromString,
            response_serializer=pb.KvEventBatch.SerializeToString,
        )
        methods = {"SubscribeKvEvents": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, methods),))

    async def SubscribeKvEvents(self, request: pb.SubscribeKvEventsRequest, context: Context) -> None:
        # At once: smg takes two seconds without them for a worker that does not answer.
        await context.send_initial_metadata(())
        if self._feed is None:
            self._metrics.rpc_refused.labels("off").inc()
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, self._reason)
        reader = self._feed.attach()
        try:
            await _Stream(self._feed, reader, self._metrics, self._snapshots, self._writer(context)).run(
                request.start_sequence_number
            )
        except TimeoutError:
            self._metrics.rpc_stalled.inc()
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, f"the reader took nothing for {self._stall_s:g} s"
            )
        finally:
            self._feed.detach(reader)

    def _writer(self, context: Context) -> Write:
        """Raises TimeoutError when the reader does not take the message."""

        async def write(message: pb.KvEventBatch) -> None:
            async with asyncio.timeout(self._stall_s):
                await context.write(message)
            self._metrics.rpc_batches.inc()

        return write


class _Stream:
    """One call. `cursor` is the number of the last batch that the reader has of us."""

    def __init__(
        self,
        feed: KvEventFeed,
        reader: FeedReader,
        metrics: PublisherMetrics,
        snapshots: asyncio.Semaphore,
        write: Write,
    ) -> None:
        self._feed = feed
        self._reader = reader
        self._metrics = metrics
        self._snapshots = snapshots
        self._write = write
        self._cursor = 0
        self._is_partial = False
        """The last snapshot said that something is unknown; the reader believes that until another one."""

    async def run(self, cursor: int) -> None:
        """Ends with the call."""
        self._cursor = cursor
        cause = await self._catch_up()
        while True:
            if cause:
                await self._send_state(cause)
            cause = await self._follow()

    async def _catch_up(self) -> str:
        """Why a snapshot is needed, or nothing."""
        batches, cause = self._feed.history(self._cursor)
        for sequence, payload in batches:
            entry = self._feed.past_entry(sequence, payload)
            if entry is None or entry.message is None:
                return "untellable"
            await self._write(entry.message)
            self._cursor = entry.number
        return cause

    async def _follow(self) -> str:
        """Sends what comes until a snapshot is needed, and says why."""
        while True:
            entry = await self._reader.take()
            if entry is None:
                return "slow"
            if entry.number <= self._cursor:
                continue
            if entry.number != self._cursor + 1:
                return "gap"
            if entry.message is None:
                return "untellable"
            await self._write(entry.message)
            self._cursor = entry.number
            if self._is_partial and self._feed.complete:
                return "completed"

    async def _send_state(self, cause: str) -> None:
        async with self._snapshots:
            self._metrics.rpc_snapshots.labels(cause).inc()
            # What is published from here on waits in the queue; what the state has already is passed over.
            self._reader.restart()
            number, state, complete = await self._feed.freeze()
            options = self._feed.options
            for chunk in snapshot_chunks(
                state,
                last_number=number,
                rank=options.rank,
                timestamp=time(),
                unknown_before=0 if complete else 1,
                needs_tokens=options.needs_tokens,
                on_left_out=self._feed.left_out,
            ):
                if chunk.snapshot.index == 0:
                    self._feed.note_snapshot(chunk.sequence_number, number)
                await self._write(chunk)
            self._cursor = number
            self._is_partial = not complete
