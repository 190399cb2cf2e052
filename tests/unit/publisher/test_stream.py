"""The published stream as recorded streams check it, beyond what is recorded."""

import pytest

from reprise_cli.conformance_publisher import ConformancePublisher
from reprise_core.errors import ErrorKind
from reprise_core.kv_events import AllBlocksCleared, BlockStored, KvEventBatch
from reprise_publisher.stream import PublisherClosed
from reprise_wire.event_codec import END_SEQ, EventForm, ReplayRequest, decode_batch, parse_pub_frames
from support.event_source import stored

BATCH = KvEventBatch(1.0, (AllBlocksCleared(),))


def publisher(buffer_steps: int = 3, form: EventForm = EventForm.MAP) -> ConformancePublisher:
    return ConformancePublisher(topic="t", rank=2, buffer_steps=buffer_steps, form=form)


def replayed(source: ConformancePublisher, start: int) -> list[int]:
    *batches, end = source.replay(ReplayRequest(b"id", start))
    assert end == [b"id", b"", b"", END_SEQ, b""]
    return [int.from_bytes(frames[3], "big") for frames in batches]


def test_sequences_count_from_0_and_the_rank_is_filled_in() -> None:
    source = publisher()
    messages = [parse_pub_frames(source.publish(BATCH)) for _ in range(3)]
    assert [message.sequence for message in messages] == [0, 1, 2]
    assert decode_batch(messages[0].payload).data_parallel_rank == 2


def test_a_replay_sends_the_same_bytes_as_live() -> None:
    """vllm#45174: replay answers lacked the topic."""
    source = publisher(buffer_steps=6)
    live = [source.publish(KvEventBatch(float(number), (stored(number),))) for number in range(6)]
    *answers, end = source.replay(ReplayRequest(b"id", 0))
    assert [answer[2:] for answer in answers] == live
    assert all(answer[:2] == [b"id", b""] for answer in answers)
    assert end[3] == END_SEQ


@pytest.mark.parametrize("form", EventForm)
def test_every_form_decodes_to_the_same_events_with_salt_adapter_and_image(form: EventForm) -> None:
    events = (
        stored(1),
        BlockStored(
            block_hashes=(2, 2**64 - 1),
            parent_block_hash=1,
            token_ids=tuple(range(8)),
            block_size=4,
            lora_id=3,
            lora_name="sql",
            medium="GPU",
            extra_keys=(("sql", ("image", 4), "salt"), None),
            group_idx=1,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=64,
        ),
        AllBlocksCleared(),
    )
    message = parse_pub_frames(publisher(form=form).publish(KvEventBatch(1.0, events)))
    assert decode_batch(message.payload) == KvEventBatch(1.0, events, 2)


def test_only_what_the_buffer_holds_comes_back() -> None:
    source = publisher(buffer_steps=3)
    for _ in range(5):
        source.publish(BATCH)
    assert replayed(source, 0) == [2, 3, 4]
    assert replayed(source, 4) == [4]
    assert replayed(source, 5) == []
    assert replayed(source, 2**200) == []
    empty = publisher(buffer_steps=0)
    empty.publish(BATCH)
    assert replayed(empty, 0) == []


def test_nothing_is_published_after_the_end() -> None:
    source = publisher()
    source.close()
    with pytest.raises(RuntimeError) as caught:
        source.publish(BATCH)
    assert isinstance(caught.value, PublisherClosed)
    assert caught.value.kind is ErrorKind.FAILED_PRECONDITION
