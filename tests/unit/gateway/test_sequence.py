"""One sequence: repeated tokens, rebuilt text, merged news, how it ends."""

from dataclasses import replace

import msgspec
import pytest

from reprise_core.requests import FinishReason, PromptSources, SamplingParams
from reprise_gateway.errors import ApiError
from reprise_gateway.sequence import OutOfStep, Sequence, Update, Work
from reprise_wire.clients.engine import Ending, RequestDelta
from reprise_wire.clients.tokenizer import DetokenizeOpen, TextDelta


def _sequence(*, ignore_eos: bool = False, include_stop: bool = False) -> Sequence:
    return Sequence(
        "r",
        Work(
            model="m",
            prompt_ids=(1, 2),
            hashes={},
            sampling=SamplingParams(max_tokens=9, ignore_eos=ignore_eos),
            text=DetokenizeOpen(include_stop_in_text=include_stop),
            eos_token_ids=frozenset({2}),
        ),
    )


def _delta(first: int, *ids: int, ending: Ending | None = None) -> RequestDelta:
    return RequestDelta("r", first, ids, PromptSources(prompt_tokens=2, device=first + 1), ending)


def _text(text: str, num_tokens: int, *, stop: str | None = None, finished: bool = False) -> TextDelta:
    return TextDelta("r", text, num_tokens, stop, finished)


def test_repeated_indices_are_ignored_and_gaps_are_not() -> None:
    sequence = _sequence()
    sequence.take_tokens(_delta(0, 10, 11))
    sequence.take_tokens(_delta(0, 10, 11, 12))
    sequence.take_tokens(_delta(1, 11))
    assert sequence.output_ids == [10, 11, 12]
    assert sequence.sources == PromptSources(prompt_tokens=2, device=1)
    with pytest.raises(OutOfStep):
        sequence.take_tokens(_delta(4, 14))
    assert sequence.output_ids == [10, 11, 12]


def test_repeated_tokens_repeat_no_log_probabilities() -> None:
    sequence = _sequence()
    sampling = msgspec.structs.replace(sequence.work.sampling, logprobs=0)
    sequence.work = replace(sequence.work, sampling=sampling)
    rows = [bytes([token] * 8) for token in (10, 11, 12)]
    for first, last in ((0, 1), (0, 2), (1, 2), (1, 3)):
        delta = replace(_delta(first, *range(10 + first, 10 + last)), logprobs=b"".join(rows[first:last]))
        sequence.take_tokens(replace(delta, prompt_logprobs=b"p" if first == 0 else b""))
    assert sequence.output_ids == [10, 11, 12]
    assert sequence.logprobs == b"".join(rows)
    assert sequence.prompt_logprobs == b"p"


async def test_news_is_merged_for_a_slow_reader() -> None:
    sequence = _sequence()
    sequence.take_tokens(_delta(0, 10, 11))
    sequence.take_text(_text("a", 1))
    sequence.take_text(_text("b", 2))
    assert await sequence.next_update() == Update("ab", 2, None, None)
    sequence.take_tokens(_delta(2, 12, ending=Ending(FinishReason.LENGTH)))
    sequence.take_text(_text("c", 3, finished=True))
    assert await sequence.next_update() == Update("c", 3, "length", None)
    assert sequence.done


async def test_text_given_again_by_a_new_stream_is_skipped() -> None:
    sequence = _sequence()
    sequence.take_tokens(_delta(0, 10, 11))
    sequence.take_text(_text("ab", 1))
    sequence.take_text(_text("c", 2))
    sequence.reopen_text()
    sequence.take_text(_text("a", 1))
    sequence.take_text(_text("bcd", 3))
    assert (await sequence.next_update()).text == "abcd"


@pytest.mark.parametrize(
    ("token", "ignore_eos", "stop_reason"), [(2, False, None), (7, False, 7), (2, True, 2)]
)
async def test_a_stop_token_makes_no_text_but_counts(
    token: int, ignore_eos: bool, stop_reason: int | None
) -> None:
    sequence = _sequence(ignore_eos=ignore_eos)
    sequence.take_tokens(_delta(0, 10, token, ending=Ending(FinishReason.STOP, stop_token_id=token)))
    assert sequence.num_text_tokens == 1
    sequence.take_text(_text("a", 1, finished=True))
    assert await sequence.next_update() == Update("a", 2, "stop", stop_reason)


def test_a_stop_token_is_shown_when_asked_for() -> None:
    sequence = _sequence(include_stop=True)
    sequence.take_tokens(_delta(0, 10, 7, ending=Ending(FinishReason.STOP, stop_token_id=7)))
    assert sequence.num_text_tokens == 2


async def test_tokens_past_a_stop_string_do_not_count() -> None:
    sequence = _sequence()
    sequence.take_tokens(_delta(0, 10, 11, 12, 13))
    sequence.take_text(_text("a", 2, stop="x", finished=True))
    assert await sequence.next_update() == Update("a", 2, "stop", "x")


async def test_an_error_is_raised_to_the_reader_once_done_it_stays_done() -> None:
    sequence = _sequence()
    sequence.fail(ApiError(503, "gone"))
    sequence.fail(ApiError(500, "other"))
    with pytest.raises(ApiError, match="gone"):
        await sequence.next_update()
