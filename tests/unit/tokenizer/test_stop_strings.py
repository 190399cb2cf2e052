"""Stop strings: found wherever the text is cut, and nothing that may become one is shown."""

from hypothesis import given
from hypothesis import strategies as st

from reprise_tokenizer.stop_strings import StopFinder, StopMatch

TEXT = st.text(alphabet="ab🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=4), max_size=3)


def _run(pieces: list[str], stops: list[str], *, include: bool) -> tuple[str, str | None]:
    finder = StopFinder(stops, include=include)
    shown = ""
    for piece in pieces:
        found = finder.feed(piece)
        if isinstance(found, StopMatch):
            return shown + found.text, found.stop
        shown += found
    return shown + finder.flush(), None


def _expected(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """Character by character: the first end of a stop string; of those, the one that began first."""
    for end in range(1, len(text) + 1):
        matches = [(end - len(stop), i) for i, stop in enumerate(stops) if text[:end].endswith(stop)]
        if matches:
            start, i = min(matches)
            return text[: end if include else start], stops[i]
    return text, None


@given(text=TEXT, stops=STOPS, include=st.booleans())
def test_fed_by_characters_it_finds_the_first_match(text: str, stops: list[str], include: bool) -> None:
    assert _run(list(text), stops, include=include) == _expected(text, stops, include=include)


@given(pieces=st.lists(st.text(alphabet="ab🙂", max_size=5), max_size=8), stops=STOPS, include=st.booleans())
def test_nothing_is_shown_past_the_match_and_no_match_is_missed(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    text = "".join(pieces)
    shown, stop = _run(pieces, stops, include=include)
    assert text.startswith(shown)
    if stop is None:
        assert shown == text
        assert not any(one in text for one in stops)
    elif include:
        assert shown.endswith(stop)
    else:
        assert text[len(shown) :].startswith(stop)
        assert not any(one in shown for one in stops)


def test_what_may_become_a_stop_is_held_back() -> None:
    finder = StopFinder(["</end>"])
    assert finder.feed("Hello <") == "Hello "
    assert finder.feed("/en") == ""
    assert finder.feed("x") == "</enx"
    assert finder.feed("</end") == ""
    assert finder.feed("> more") == StopMatch("</end>", "")


def test_flush_gives_what_was_held() -> None:
    finder = StopFinder(["abc"])
    assert finder.feed("xab") == "x"
    assert finder.flush() == "ab"


def test_a_match_within_unsearched_text_does_not_count_later() -> None:
    finder = StopFinder(["ab", "abab"])
    assert finder.feed("ab", searching=False) == ""
    assert finder.feed("x") == "abx"
    assert finder.feed("ab") == StopMatch("ab", "")


def test_of_two_that_begin_together_the_one_listed_first_counts() -> None:
    assert StopFinder(["ab", "a"]).feed("xaby") == StopMatch("ab", "x")
    assert StopFinder(["a", "ab"]).feed("xaby") == StopMatch("a", "x")
