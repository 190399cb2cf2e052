"""Request fields that are known and not honoured, and values of them that change nothing.

Set to anything else they get a 400 that names the field: an answer that silently differs from what
was asked for would be worse.
"""

from collections.abc import Callable, Mapping
from typing import Any

from reprise_gateway.errors import bad_rule

_Neutral = Callable[[Any], bool]


def _one_of(*values: Any) -> _Neutral:
    return lambda value: value is None or any(type(value) is type(one) and value == one for one in values)


def _number(number: float) -> _Neutral:
    return lambda value: (
        value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value == number)
    )


def _empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _text_format(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


_NEUTRAL: dict[str, tuple[_Neutral, str]] = {
    "logit_bias": (_empty, "leave it out"),
    "presence_penalty": (_number(0), "0"),
    "frequency_penalty": (_number(0), "0"),
    "repetition_penalty": (_number(1), "1"),
    "length_penalty": (_number(1), "1"),
    "min_p": (_number(0), "0"),
    "best_of": (_number(1), "1"),
    "use_beam_search": (_one_of(False), "false"),
    "bad_words": (_empty, "leave it out"),
    "allowed_token_ids": (_empty, "leave it out"),
    "truncate_prompt_tokens": (_one_of(), "leave it out"),
    "response_format": (_text_format, '{"type": "text"}'),
    "structured_outputs": (_empty, "leave it out"),
    "guided_json": (_empty, "leave it out"),
    "guided_regex": (_empty, "leave it out"),
    "guided_choice": (_empty, "leave it out"),
    "guided_grammar": (_empty, "leave it out"),
    "logits_processors": (_empty, "leave it out"),
    "prompt_embeds": (_empty, "leave it out"),
    "spaces_between_special_tokens": (_one_of(True), "true"),
    "kv_transfer_params": (_empty, "leave it out"),
}
_COMPLETION = {
    "suffix": (_empty, "leave it out"),
}
_CHAT = {
    "echo": (_one_of(False), "false"),
    "audio": (_empty, "leave it out"),
    "modalities": (_one_of(["text"]), '["text"]'),
    "functions": (_empty, "use tools"),
    "function_call": (_one_of("none", "auto"), "none or auto"),
    "tool_choice": (_one_of("none", "auto"), "none or auto"),
    "reasoning_effort": (_one_of(), "leave it out"),
    "verbosity": (_one_of("medium"), "medium"),
    "web_search_options": (_one_of(), "leave it out"),
    "chat_template": (_empty, "leave it out: the model's own is used"),
    "documents": (_empty, "leave it out"),
    "mm_processor_kwargs": (_empty, "leave it out"),
}
_HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls", "prediction", "request_id", "include_reasoning",
    "documents", "echo", "top_logprobs",
})  # fmt: skip
"""Known fields that change nothing in the tokens of an answer."""


def check_refused(extra: Mapping[str, Any], *, chat: bool) -> int:
    """Raises for a field that would change the answer; returns how many fields nobody knows."""
    rules = _NEUTRAL | (_CHAT if chat else _COMPLETION)
    num_unknown = 0
    for name, value in extra.items():
        rule = rules.get(name)
        if rule is None:
            num_unknown += name not in _HARMLESS
        elif not rule[0](value):
            shown = repr(value)
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            raise bad_rule(name, f"{name}: {shown} is not supported; allowed: {rule[1]}")
    return num_unknown
