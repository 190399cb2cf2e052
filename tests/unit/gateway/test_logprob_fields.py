"""What asks for log-probabilities, and what is refused: by field, value, and what is allowed."""

from typing import Any

import pytest

from reprise_gateway.calls import CallLimits, read_chat, read_completion
from reprise_gateway.errors import ApiError
from reprise_gateway.logprob_fields import LogprobFields

LIMITS = CallLimits(max_choices=8, max_stop_strings=4, max_stop_characters=16)
USER = [{"role": "user", "content": "hi"}]


def completion(**body: Any) -> LogprobFields:
    return read_completion({"prompt": "hi", **body}, LIMITS).logprobs


def chat(**body: Any) -> LogprobFields:
    return read_chat({"messages": USER, **body}, LIMITS).logprobs


@pytest.mark.parametrize("body", [{}, {"logprobs": None}, {"logprobs": False}, {"prompt_logprobs": None}])
def test_nothing_is_measured_unless_asked_for(body: dict[str, Any]) -> None:
    for asked in (completion(**body), chat(**body)):
        assert (asked.output, asked.prompt, asked.measured_prompt) == (None, None, None)


@pytest.mark.parametrize("count", [0, 1, 20])
def test_counts(count: int) -> None:
    assert completion(logprobs=count).output == count
    assert chat(logprobs=True, top_logprobs=count).output == count
    assert completion(prompt_logprobs=count).measured_prompt == count
    assert chat(prompt_logprobs=count).measured_prompt == count


def test_a_chat_that_names_no_count_has_the_tokens_alone() -> None:
    assert chat(logprobs=True).output == 0
    assert chat(top_logprobs=0).output is None


def test_an_echoed_prompt_is_measured_as_the_output_is() -> None:
    assert completion(logprobs=3).measured_prompt is None
    assert completion(echo=True).measured_prompt is None
    assert completion(echo=True, logprobs=3).measured_prompt == 3
    assert completion(echo=True, logprobs=3, prompt_logprobs=5).measured_prompt == 5
    assert completion(echo=True, logprobs=3, prompt_logprobs=1).measured_prompt == 3


@pytest.mark.parametrize("read", [completion, chat])
@pytest.mark.parametrize("value", [-1, 21, 1000, 1.5, "2", True, [1]])
def test_a_bad_count_names_field_value_and_range(read: Any, value: Any) -> None:
    name = "logprobs" if read is completion else "top_logprobs"
    for field in (name, "prompt_logprobs"):
        body = {"logprobs": True, field: value} if read is chat else {field: value}
        with pytest.raises(ApiError) as caught:
            read(**body)
        assert (caught.value.status, caught.value.param) == (400, field)
        assert str(caught.value) == f"{field}: {value!r}, must be a whole number from 0 to 20"


@pytest.mark.parametrize("value", [1, 0, "true"])
def test_a_chat_asks_with_true(value: Any) -> None:
    with pytest.raises(ApiError, match="must be true or false") as caught:
        chat(logprobs=value)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize("logprobs", [None, False])
def test_top_logprobs_alone_is_refused(logprobs: Any) -> None:
    with pytest.raises(ApiError, match="top_logprobs: 2, only allowed with logprobs true") as caught:
        chat(logprobs=logprobs, top_logprobs=2)
    assert caught.value.param == "top_logprobs"


@pytest.mark.parametrize("read", [completion, chat])
def test_a_prompt_is_not_measured_in_a_stream(read: Any) -> None:
    with pytest.raises(ApiError, match="prompt_logprobs: 0, not available with stream true") as caught:
        read(prompt_logprobs=0, stream=True)
    assert caught.value.param == "prompt_logprobs"
    assert read(stream=True, prompt_logprobs=None).prompt is None
    with pytest.raises(ApiError, match="logprobs: 1, not available with both echo and stream true"):
        completion(logprobs=1, echo=True, stream=True)
