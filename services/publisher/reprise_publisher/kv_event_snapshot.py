"""The state of the cache as chunks of the gRPC stream (`smg.grpc.common.KvSnapshotChunk`)."""

from collections.abc import Callable, Iterator
from typing import Protocol

from smg_grpc_proto.generated import common_pb2 as pb

from reprise_core.kv_events import AllBlocksCleared, BlockStored, ExternalHash
from reprise_publisher.kv_event_proto import Untellable, event_to_proto

TOKENS_PER_CHUNK = 96 * 1024
"""Keeps a message well below the 4 MiB that gRPC clients take by default."""
MAX_BLOCKS_PER_CHUNK = 1024
EVENTS_PER_CHUNK = 8


class StateEvent(Protocol):
    @property
    def event(self) -> BlockStored: ...
    @property
    def resolved(self) -> bool: ...


class FrozenState(Protocol):
    """The live blocks at one moment; parents come before children, each physical copy once."""

    @property
    def num_copies(self) -> int: ...

    def stores(self, blocks_per_event: int) -> Iterator[StateEvent]: ...


def snapshot_chunks(
    state: FrozenState,
    *,
    last_number: int,
    rank: int,
    timestamp: float,
    unknown_before: int,
    needs_tokens: bool,
    on_left_out: Callable[[str], None],
) -> Iterator[pb.KvEventBatch]:
    """Chunks that end at `last_number`. How many is known from the number of blocks alone: chunk i ends
    with the event that reaches block (i + 1) * blocks_per_chunk, and since no event is longer than a chunk,
    none but the last can be empty."""
    per_chunk = _blocks_per_chunk(state)
    count = max(1, -(-state.num_copies // per_chunk))
    stores = _tellable(state.stores(max(1, per_chunk // EVENTS_PER_CHUNK)), needs_tokens, on_left_out)
    events = [event_to_proto(AllBlocksCleared(), event_id=0)]
    num_seen = 0
    for index in range(count):
        while index == count - 1 or num_seen < (index + 1) * per_chunk:
            told = next(stores, None)
            if told is None:
                break
            num_blocks, message = told
            num_seen += num_blocks
            if message is not None:
                events.append(message)
        yield pb.KvEventBatch(
            sequence_number=last_number - count + 1 + index,
            timestamp=timestamp,
            events=events,
            dp_rank=rank,
            snapshot=pb.KvSnapshotChunk(
                index=index, count=count, blocks=state.num_copies, unknown_before=unknown_before
            ),
        )
        events = []


def _tellable(
    stores: Iterator[StateEvent], needs_tokens: bool, on_left_out: Callable[[str], None]
) -> Iterator[tuple[int, pb.KvCacheEvent | None]]:
    """Each event's number of blocks and its message; None for one that must be left out.

    A consumer takes a block whose parent it does not know for the start of a chain and would find it
    for prompts that only begin like it. So what follows a left out block is left out with it.
    """
    left_out: set[tuple[int, ExternalHash]] = set()
    for stored in stores:
        event, group = stored.event, stored.event.group_idx or 0
        message, cause = None, ""
        if not stored.resolved or (group, event.parent_block_hash) in left_out:
            cause = "no_parent"
        else:
            try:
                message = event_to_proto(event, event_id=0, needs_tokens=needs_tokens)
            except Untellable as problem:
                cause = problem.cause
        if cause:
            on_left_out(cause)
            left_out.update((group, block_hash) for block_hash in event.block_hashes)
        yield len(event.block_hashes), message


def _blocks_per_chunk(state: FrozenState) -> int:
    first = next(state.stores(1), None)
    block_size = first.event.block_size if first is not None else 1
    return max(1, min(MAX_BLOCKS_PER_CHUNK, TOKENS_PER_CHUNK // max(1, block_size)))
