"""Chat templates: what they are given, what they may do, and how refusals read."""

import contextlib
from typing import Any

import pytest

from reprise_core.errors import InvalidInput
from reprise_tokenizer.chat_template import ChatTemplate, parse_messages
from support.models import TINY_CHAT_TEMPLATE

USER = [{"role": "user", "content": "hi"}]


def _template(source: str, **limits: Any) -> ChatTemplate:
    settings: dict[str, Any] = {
        "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
        "max_template_bytes": 10_000,
        "max_rendered_bytes": 10_000,
        "timeout_s": 5.0,
    }
    return ChatTemplate(source, **{**settings, **limits})


def test_messages_and_generation_prompt() -> None:
    template = _template(TINY_CHAT_TEMPLATE)
    expected = "<|im_start|>user\nhi<|im_end|>\n"
    assert template.render(USER, add_generation_prompt=False) == expected
    assert template.render(USER) == expected + "<|im_start|>assistant\n"


def test_blocks_are_trimmed_and_special_tokens_are_variables() -> None:
    source = (
        "{{ bos_token }}\n    {% for m in messages %}\n{{ m['content'] }}\n    {% endfor %}\n{{ eos_token }}"
    )
    assert _template(source).render(USER) == "<s>\nhi\n</s>"


def test_tojson_does_not_escape_for_html() -> None:
    tools = [{"name": "é<&>'"}]
    assert _template("{{ tools | tojson }}").render(USER, tools=tools) == '[{"name": "é<&>\'"}]'
    indented = _template("{{ tools | tojson(indent=2) }}").render(USER, tools=tools)
    assert indented.startswith('[\n  {\n    "name"')


def test_loop_controls_generation_blocks_and_time() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}[{{ messages[0].content }}]{% endgeneration %}{{ strftime_now('%Y') | length }}"
    )
    assert _template(source).render(USER) == "01[hi]4"


def test_variables_from_the_caller() -> None:
    template = _template("{{ enable_thinking }} {{ messages | length }}")
    assert template.render(USER, variables={"enable_thinking": True, "messages": []}) == "True 1"


def test_raise_exception_names_messages_and_says_why() -> None:
    with pytest.raises(InvalidInput, match=r"messages: .*unknown role robot"):
        _template(TINY_CHAT_TEMPLATE).render([{"role": "robot", "content": "hi"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content.x }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ undefined_name() }}",
    ],
)
def test_a_template_that_trips_is_the_callers_error(source: str) -> None:
    with pytest.raises(InvalidInput, match="messages: the chat template refuses them"):
        _template(source).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with contextlib.suppress(InvalidInput):
        assert _template(source).render(USER) == ""


def test_limits_on_size_and_time() -> None:
    with pytest.raises(InvalidInput, match="chat_template: 10001 bytes"):
        _template("x" * 10_001)
    with pytest.raises(InvalidInput, match="more than 10000 characters"):
        _template("{% for i in range(99999) %}xx{% endfor %}").render(USER)
    ticks = iter(range(10**6))
    slow = _template("{% for i in range(99) %}{{ i }}{% endfor %}", timeout_s=9.0, clock=lambda: next(ticks))
    with pytest.raises(InvalidInput, match="more than 9 s"):
        slow.render(USER)


def test_a_broken_template_says_so() -> None:
    with pytest.raises(InvalidInput, match="chat_template: does not compile"):
        _template("{% for %}")


class TestContent:
    def _render(self, content: Any, source: str = "{{ messages[0].content }}") -> str:
        return _template(source).render([{"role": "user", "content": content}])

    def test_text_parts_are_joined(self) -> None:
        assert self._render([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "a\nb"

    def test_no_content_is_empty_text(self) -> None:
        assert self._render(None) == ""

    def test_a_template_that_walks_parts_gets_parts(self) -> None:
        source = "{% for m in messages %}{% for p in m['content'] %}<{{ p.text }}>{% endfor %}{% endfor %}"
        assert self._render("a", source) == "<a>"
        assert (
            self._render([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], source) == "<a><b>"
        )

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([{"type": "image_url", "image_url": {}}], r"messages\[0\].content\[0\]: type 'image_url'"),
            ([{"type": "text"}], r"messages\[0\].content\[0\].text: must be text"),
            (7, r"messages\[0\].content: int"),
        ],
    )
    def test_other_content_is_refused_by_name(self, content: Any, message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            self._render(content)


def test_tool_call_arguments_become_an_object() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    template = _template("{{ messages[0].tool_calls[0].function.arguments.x + 1 }}")
    assert template.render([{"role": "assistant", "tool_calls": [call]}]) == "2"


def test_the_final_message_is_continued() -> None:
    messages = [*USER, {"role": "assistant", "content": "The sky "}]
    text = _template(TINY_CHAT_TEMPLATE).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text.endswith("<|im_start|>assistant\nThe sky")
    with pytest.raises(InvalidInput, match="continue_final_message"):
        _template(TINY_CHAT_TEMPLATE).render(messages, continue_final_message=True)


@pytest.mark.parametrize("text", ["{", "[]", "{}", "[1]", '"a"'])
def test_messages_that_are_none(text: str) -> None:
    with pytest.raises(InvalidInput, match="messages"):
        parse_messages(text)


def test_a_role_that_nobody_knows_is_refused_unless_left_to_the_template() -> None:
    source = "{% for message in messages %}{{ message.role if message.role != 'critic' }}{% endfor %}"
    known = [{"role": role, "content": "x"} for role in ("system", "tool", "critic")]
    assert _template(source).render(known) == "systemtool"
    unknown = [*known, {"role": "wizard", "content": "x"}]
    with pytest.raises(InvalidInput, match=r"messages\[3\]\.role: 'wizard', must be one of assistant, "):
        _template(source).render(unknown)
    assert _template(source, any_role=True).render(unknown) == "systemtoolwizard"
