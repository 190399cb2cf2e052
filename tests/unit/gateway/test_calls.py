"""Request fields: what is read, and how what is refused is named."""

from typing import Any

import pytest

from reprise_gateway.calls import CallLimits, read_chat, read_completion, read_detokenize, read_tokenize
from reprise_gateway.errors import ApiError
from reprise_wire.clients.tokenizer import ChatPrompt

LIMITS = CallLimits(max_choices=4, max_stop_strings=2, max_stop_characters=5)
USER = [{"role": "user", "content": "hi"}]


def _refusal(body: dict[str, Any], *, chat: bool = False) -> ApiError:
    read, least = (read_chat, {"messages": USER}) if chat else (read_completion, {"prompt": "hi"})
    with pytest.raises(ApiError) as caught:
        read({**least, **body}, LIMITS)
    assert caught.value.status == 400
    return caught.value


def test_defaults() -> None:
    call = read_completion({"prompt": "hi"}, LIMITS)
    assert call.prompts == ("hi",)
    sampling = call.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (16, 1.0, 1.0, 0)
    assert sampling.skip_special_tokens
    assert call.add_special_tokens
    chat = read_chat({"messages": USER}, LIMITS)
    assert chat.sampling.max_tokens is None
    assert not chat.add_special_tokens


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_four_kinds_of_prompts(prompt: Any, expected: Any) -> None:
    assert read_completion({"prompt": prompt}, LIMITS).prompts == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0), ("presence_penalty", 0.0), ("frequency_penalty", None), ("logit_bias", {}),
        ("response_format", {"type": "text"}), ("best_of", 1), ("suffix", ""), ("logprobs", None),
        ("repetition_penalty", 1.0), ("min_p", 0), ("user", "me"), ("metadata", {"a": "b"}),
        ("use_beam_search", False), ("bad_words", []), ("store", True), ("service_tier", "auto"),
    ],
)  # fmt: skip
def test_known_fields_with_neutral_values_pass(field: str, value: Any) -> None:
    assert read_completion({"prompt": "hi", field: value}, LIMITS).num_unknown_fields == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.1), ("frequency_penalty", -1), ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}), ("best_of", 2), ("suffix", "x"), ("min_p", 0.1),
        ("repetition_penalty", 1.1), ("use_beam_search", True), ("best_of", True),
        ("guided_regex", "a+"), ("structured_outputs", {"json": {}}), ("prompt_embeds", "abc"),
    ],
)  # fmt: skip
def test_known_fields_that_would_change_the_answer_are_refused_by_name(field: str, value: Any) -> None:
    error = _refusal({field: value})
    assert error.param == field
    assert field in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}), ("modalities", ["audio"]),
        ("tool_choice", "required"), ("functions", [{"name": "f"}]), ("reasoning_effort", "high"),
        ("chat_template", "{{ 1 }}"), ("web_search_options", {}), ("echo", True),
    ],
)  # fmt: skip
def test_known_chat_fields_are_refused_by_name(field: str, value: Any) -> None:
    assert _refusal({field: value}, chat=True).param == field


def test_neutral_chat_fields_pass_and_unknown_ones_are_counted() -> None:
    body = {
        "messages": USER,
        "logprobs": False,
        "top_logprobs": 0,
        "modalities": ["text"],
        "tool_choice": "auto",
    }
    assert read_chat(body, LIMITS).num_unknown_fields == 0
    assert read_chat({**body, "no_such_field": 1, "nor_this": None}, LIMITS).num_unknown_fields == 2


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"max_tokens": 10, "min_tokens": 11}, "min_tokens", "at most max_tokens"),
        ({"min_tokens": -1}, "min_tokens", "at least 0"),
        ({"temperature": float("nan")}, "temperature", "nan"),
        ({"temperature": float("inf")}, "temperature", "inf"),
        ({"top_p": float("nan")}, "top_p", "above 0"),
        ({"top_k": 2**40}, None, "top_k"),
        ({"seed": 2**64}, "seed", "64 bits"),
        ({"priority": 2**40}, "priority", "32 bits"),
        ({"stop": ["a", "b", "c"]}, "stop", "at most 2"),
        ({"stop": ["abcdef"]}, "stop", "6 characters, at most 5"),
        ({"stop": ""}, "stop", "is empty"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
        ({"n": 5}, "n", "at most 4"),
        ({"n": 2, "temperature": 0}, "n", "all be the same"),
        ({"stop_token_ids": ["x"]}, "body.stop_token_ids.0", "'x'"),
        ({"stream_options": {"include_usage": "maybe"}}, "body.stream_options.include_usage", "maybe"),
        ({"prompt": ["a", 1]}, "body.prompt.1", "must be text"),
        ({"prompt": [[1], 2]}, "body.prompt.1", "must be token ids"),
        ({"prompt": [True]}, "body.prompt.0", "token id"),
    ],
)  # fmt: skip
def test_refusals_name_field_value_and_what_is_allowed(
    body: dict[str, Any], param: str | None, message: str
) -> None:
    error = _refusal(body)
    assert error.param == param
    assert message in str(error)


def test_chat_fields() -> None:
    call = read_chat(
        {
            "messages": USER,
            "tools": [{"type": "function"}],
            "chat_template_kwargs": {"enable_thinking": False},
            "max_tokens": 5,
            "max_completion_tokens": 7,
            "stop": "x",
            "top_k": -1,
        },
        LIMITS,
    )
    (prompt,) = call.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools_json == '[{"type": "function"}]'
    assert prompt.template_kwargs_json == '{"enable_thinking": false}'
    assert (call.sampling.max_tokens, call.sampling.max_tokens_field) == (7, "max_completion_tokens")
    assert (call.sampling.stop, call.sampling.top_k) == (("x",), 0)


def test_continuing_the_final_message_excludes_a_generation_prompt() -> None:
    call = read_chat({"messages": USER, "continue_final_message": True}, LIMITS)
    (prompt,) = call.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.continue_final_message
    assert not prompt.add_generation_prompt
    body = {"continue_final_message": True, "add_generation_prompt": True}
    assert _refusal(body, chat=True).param == "continue_final_message"


def test_tokenize_and_detokenize() -> None:
    assert read_tokenize({"prompt": "a"}).add_special_tokens
    assert isinstance(read_tokenize({"messages": USER}).prompt, ChatPrompt)
    assert read_detokenize({"tokens": [1, 2]}).token_ids == (1, 2)
    with pytest.raises(ApiError) as caught:
        read_tokenize({"prompt": "a", "return_token_strs": True})
    assert caught.value.param == "return_token_strs"
