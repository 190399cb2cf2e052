import pytest

from reprise_core.errors import ErrorKind
from reprise_core.kv_events import AllBlocksCleared, KvEventBatch
from reprise_wire.event_codec import END_SEQ, ReplayRequest, decode_batch, parse_pub_frames
from reprise_wire.event_stream import EventStream, PublisherClosed

BATCH = KvEventBatch(1.0, (AllBlocksCleared(),))


def stream(buffer_steps: int = 3) -> EventStream:
    return EventStream(topic="t", rank=2, buffer_steps=buffer_steps)


def replayed(source: EventStream, start: int) -> list[int]:
    *batches, end = list(source.replay(ReplayRequest(b"id", start)))
    assert end == [b"id", b"", b"", END_SEQ, b""]
    return [int.from_bytes(frames[3], "big") for frames in batches]


def test_sequences_count_from_0_and_the_rank_is_filled_in() -> None:
    source = stream()
    messages = [parse_pub_frames(source.publish(BATCH)) for _ in range(3)]
    assert [message.sequence for message in messages] == [0, 1, 2]
    assert decode_batch(messages[0].payload).data_parallel_rank == 2


def test_a_replay_sends_the_same_bytes_as_live() -> None:
    """vllm#45174: replay answers lacked the topic."""
    source = stream(buffer_steps=6)
    live = [source.publish(KvEventBatch(float(number), ())) for number in range(6)]
    *answers, end = list(source.replay(ReplayRequest(b"id", 0)))
    assert [answer[2:] for answer in answers] == live
    assert all(answer[:2] == [b"id", b""] for answer in answers)
    assert end[3] == END_SEQ


def test_only_what_the_buffer_holds_comes_back() -> None:
    source = stream(buffer_steps=3)
    for _ in range(5):
        source.publish(BATCH)
    assert replayed(source, 0) == [2, 3, 4]
    assert replayed(source, 4) == [4]
    assert replayed(source, 5) == []
    assert replayed(source, 2**200) == []


def test_a_lost_batch_leaves_a_gap() -> None:
    source = stream()
    source.publish(BATCH)
    assert source.skip() == 1
    source.publish(BATCH)
    assert replayed(source, 0) == [0, 2]


def test_nothing_is_published_after_the_end() -> None:
    source = stream()
    source.close()
    with pytest.raises(RuntimeError) as caught:
        source.publish(BATCH)
    assert isinstance(caught.value, PublisherClosed)
    assert caught.value.kind is ErrorKind.FAILED_PRECONDITION


def test_without_a_buffer_a_replay_is_the_end_mark_alone() -> None:
    source = stream(buffer_steps=0)
    source.publish(BATCH)
    assert replayed(source, 0) == []
