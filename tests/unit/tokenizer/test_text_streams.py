"""Text state of requests on one stream: batching changes nothing, stops are told with their token."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from reprise_core.errors import Exhausted
from reprise_tokenizer.metrics import TokenizerMetrics
from reprise_tokenizer.model_files import ModelFiles, load_model_files
from reprise_tokenizer.text_decoder import DecoderFactory
from reprise_tokenizer.text_streams import Opening, Piece, TextStreams
from support.models import write_byte_level_model


@cache
def _files() -> ModelFiles:
    with TemporaryDirectory() as folder:
        return load_model_files(write_byte_level_model(Path(folder)))


def _streams(max_requests: int = 100) -> tuple[TextStreams, CollectorRegistry]:
    files, registry = _files(), CollectorRegistry()
    factory = DecoderFactory(files.tokenizer, files.decoder, files.special_ids)
    return TextStreams(factory, max_requests=max_requests, metrics=TokenizerMetrics(registry)), registry


def _ids(text: str) -> list[int]:
    ids: list[int] = _files().tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _feed(batches: list[list[int]], opening: Opening) -> tuple[str, Piece]:
    """The whole text and the last piece; a finish comes with the last batch."""
    streams, _ = _streams()
    text, piece = "", Piece("", 0)
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        found = streams.update("r", opening if i == 0 else None, batch, finish=last)
        assert found is not None
        piece = found
        text += piece.text
        if piece.finished:
            break
    return text, piece


@given(
    ids=st.lists(st.integers(0, 399), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    stop=st.sampled_from([(), ("e",), ("th", " a"), ("�",)]),
    min_tokens=st.integers(0, 5),
    include=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_how_tokens_are_batched_changes_nothing(
    ids: list[int], cuts: list[int], stop: tuple[str, ...], min_tokens: int, include: bool
) -> None:
    opening = Opening(stop=stop, min_tokens=min_tokens, include_stop=include)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    batches = [ids[a:b] for a, b in pairwise(bounds)]
    text, end = _feed(batches, opening)
    whole, whole_end = _feed([ids], opening)
    assert (text, end.num_tokens, end.matched_stop) == (whole, whole_end.num_tokens, whole_end.matched_stop)


def test_a_stop_is_told_with_the_token_that_completed_it() -> None:
    ids = _ids("One two three four")
    text, end = _feed([[one] for one in ids], Opening(stop=("three",)))
    assert text == "One two "
    assert end.matched_stop == "three"
    assert "three" in _files().tokenizer.decode(ids[: end.num_tokens])
    assert "three" not in _files().tokenizer.decode(ids[: end.num_tokens - 1])


def test_min_tokens_delay_the_search() -> None:
    ids = _ids("a a a a")
    assert _feed([ids], Opening(stop=("a",)))[1].num_tokens == 1
    late = _feed([ids], Opening(stop=("a",), min_tokens=len(ids) - 1))
    assert late[1].num_tokens == len(ids)
    assert late[0] == "a a a "


def test_opening_again_with_all_tokens_rebuilds_the_state() -> None:
    opening = Opening(stop=("quiet!",))
    ids = _ids("the river there is quiet. été 🙂")
    streams, _ = _streams()
    first = streams.update("r", opening, ids[:9], finish=False)
    assert first is not None
    again, _ = _streams()
    replay = again.update("r", opening, ids[:9], finish=False)
    assert replay == first
    rest = [one.update("r", None, ids[9:], finish=True) for one in (streams, again)]
    assert rest[0] == rest[1]
    assert rest[0] is not None
    assert first.text + rest[0].text == "the river there is quiet. été 🙂"


def test_updates_after_the_end_are_counted_and_ignored() -> None:
    streams, registry = _streams()
    assert streams.update("r", None, [5], finish=False) is None
    streams.update("r", Opening(), [5], finish=True)
    assert streams.update("r", None, [5], finish=False) is None
    assert registry.get_sample_value("reprise_tokenizer_late_updates_total") == 2


def test_the_number_of_requests_is_bounded_and_falls_with_their_ends() -> None:
    streams, registry = _streams(max_requests=2)
    for name in ("a", "b"):
        streams.update(name, Opening(), [5], finish=False)
    with pytest.raises(Exhausted, match="more than 2 requests"):
        streams.update("c", Opening(), [5], finish=False)
    streams.update("a", None, [], finish=True)
    streams.update("c", Opening(), [5], finish=False)
    assert registry.get_sample_value("reprise_tokenizer_stream_requests") == 2
    streams.close()
    assert registry.get_sample_value("reprise_tokenizer_stream_requests") == 0
