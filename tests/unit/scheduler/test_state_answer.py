"""A state in chunks: all of it, few on the way, and numbers that fit."""

from reprise_core.block_record import BlockRecord
from reprise_scheduler.state_answer import BLOCKS_PER_CHUNK, CHUNKS_IN_FLIGHT, StateAnswer, StateSource
from reprise_wire.event_codec import decode_batch
from reprise_wire.event_intake import SourceMessage, parse_source_message
from support.event_source import facts_of, stored

SOURCE = StateSource(b"e", 12, 3, complete=True)


def answer_of(record: BlockRecord) -> StateAnswer:
    return StateAnswer(5, record.freeze(), SOURCE, now_s=0.0)


def send_all(answer: StateAnswer) -> list[SourceMessage]:
    """As many as it lets go."""
    messages = []
    while answer.may_send:
        message = answer.message()
        assert answer.message() is message
        answer.sent()
        messages.append(parse_source_message(message))
    return messages


def test_an_empty_state_is_one_chunk_that_is_the_last() -> None:
    answer = answer_of(BlockRecord(limit_blocks=10))
    (message,) = send_all(answer)
    assert answer.done
    assert message.header.sequence == 12
    state = message.header.state
    assert state is not None
    assert (state.state_id, state.index, state.last, state.num_blocks, state.complete) == (
        5,
        0,
        True,
        0,
        True,
    )
    assert decode_batch(message.payload).events == ()
    assert decode_batch(message.payload).data_parallel_rank == 3


def test_few_chunks_go_out_before_they_are_acknowledged_and_together_they_are_all() -> None:
    record = BlockRecord(limit_blocks=100_000)
    for start in range(1, 20_000, 100):
        record.apply(stored(*range(start, start + 100)))
    answer, messages = answer_of(record), []
    record.apply(stored(900_000))  # later: not in it
    messages += send_all(answer)
    assert len(messages) == CHUNKS_IN_FLIGHT
    answer.acknowledge(4, 7, now_s=1.0)  # of another state
    answer.acknowledge(5, CHUNKS_IN_FLIGHT, now_s=1.0)  # not sent yet
    assert not answer.may_send
    answer.acknowledge(5, 1, now_s=2.0)
    assert answer.progress_s == 2.0
    messages += send_all(answer)
    assert len(messages) == CHUNKS_IN_FLIGHT + 2
    while not answer.done:
        answer.acknowledge(5, len(messages) - 1, now_s=3.0)
        messages += send_all(answer)
    states = [message.header.state for message in messages]
    assert [state.index for state in states if state] == list(range(len(messages)))
    assert [state.last for state in states if state] == [False] * (len(messages) - 1) + [True]
    assert len(messages) >= 20_000 // (BLOCKS_PER_CHUNK + 64)
    again = BlockRecord(limit_blocks=100_000)
    for message in messages:
        for event in decode_batch(message.payload).events:
            again.apply(event)
    again.apply(stored(900_000))
    assert facts_of(again) == facts_of(record)
