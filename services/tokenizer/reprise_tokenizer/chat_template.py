"""A conversation to prompt text, by the model's Jinja template in a sandbox.

The environment gives templates what they are written for elsewhere: trimmed blocks, loop controls,
`tojson` without HTML escapes, `raise_exception`, `strftime_now`, and `generation` blocks, which mark
the assistant's part for training and mean nothing here.
"""

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reprise_core.errors import InvalidInput

Message = dict[str, Any]

STANDARD_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
"""Roles of OpenAI's chat API."""


class ChatTemplate:
    """One compiled template. `render` is thread-safe.

    Limits: the size of the template, of the result, and the time to render, looked at whenever the
    template writes something; a refusal is the caller's error and names `messages`.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        max_template_bytes: int,
        max_rendered_bytes: int,
        timeout_s: float,
        any_role: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if len(source.encode()) > max_template_bytes:
            raise InvalidInput(
                "chat_template", f"{len(source.encode())} bytes, at most {max_template_bytes} are allowed"
            )
        environment = _make_environment()
        try:
            tree = environment.parse(source)
            self.wants_parts = _loops_over_content(tree)
            self.roles = None if any_role else STANDARD_ROLES | _texts(tree)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidInput("chat_template", f"does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._max_rendered_bytes = max_rendered_bytes
        self._timeout_s = timeout_s
        self._clock = clock

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        if continue_final_message and add_generation_prompt:
            raise InvalidInput(
                "continue_final_message", "true, must not be set together with add_generation_prompt"
            )
        prepared = [prepare_message(message, i, parts=self.wants_parts) for i, message in enumerate(messages)]
        context = {
            **self._special_tokens,
            **(variables or {}),
            "messages": prepared,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(context)
        self._check_roles(messages)
        return _cut_after_final_message(text, prepared) if continue_final_message else text

    def _check_roles(self, messages: list[Message]) -> None:
        """A role that is neither standard nor named in the template is a mistake of the caller.

        Templates that know better have refused it by now, in their own words.
        """
        for index, message in enumerate(messages):
            if self.roles is not None and message["role"] not in self.roles:
                allowed = ", ".join(sorted(STANDARD_ROLES))
                raise InvalidInput(
                    f"messages[{index}].role", f"{message['role']!r:.60}, must be one of {allowed}"
                )

    def _render(self, context: dict[str, Any]) -> str:
        deadline_s = self._clock() + self._timeout_s
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(context):
                pieces.append(piece)
                size += len(piece)
                if size > self._max_rendered_bytes:
                    raise InvalidInput(
                        "messages", f"render to more than {self._max_rendered_bytes} characters"
                    )
                if self._clock() > deadline_s:
                    raise InvalidInput("messages", f"take more than {self._timeout_s:g} s to render")
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError,
                RecursionError) as error:  # fmt: skip
            # What a template does with unexpected input is known only by running it.
            raise InvalidInput("messages", f"the chat template refuses them: {error}") from error
        return "".join(pieces)


def parse_messages(messages_json: str) -> list[Message]:
    messages = parse_json("messages", messages_json)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidInput("messages", "must be a list of objects")
    if not messages:
        raise InvalidInput("messages", "is empty; at least one message is needed")
    return messages


def parse_json(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInput(field, f"is no JSON: {error}") from error
    except RecursionError as error:
        raise InvalidInput(field, "is nested too deeply") from error


def prepare_message(message: Message, index: int, *, parts: bool) -> Message:
    """The message as templates expect it: content as text (or as parts), arguments as objects."""
    place = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidInput(f"{place}.role", f"{role!r}, must be text")
    prepared = {**message, "content": _content(message.get("content"), place, parts=parts)}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise InvalidInput(f"{place}.tool_calls", "must be a list")
        prepared["tool_calls"] = [_tool_call(call, place) for call in calls]
    return prepared


def _content(content: Any, place: str, *, parts: bool) -> Any:
    if content is None:
        texts = []
    elif isinstance(content, str):
        texts = [content]
    elif isinstance(content, list):
        texts = [_part_text(part, f"{place}.content[{i}]") for i, part in enumerate(content)]
    else:
        raise InvalidInput(f"{place}.content", f"{type(content).__name__}, must be text or a list of parts")
    if parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
        raise InvalidInput(f"{place}.text", "must be text")
    raise InvalidInput(place, f"type {kind!r} is not supported by this model, must be text")


def _tool_call(call: Any, place: str) -> Any:
    """Clients send a call's arguments as JSON text; templates walk through them as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidInput(f"{place}.tool_calls", "each must be an object with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        parsed = parse_json(f"{place}.tool_calls.function.arguments", arguments or "{}")
        return {**call, "function": {**function, "arguments": parsed}}
    return call


def _cut_after_final_message(text: str, messages: list[Message]) -> str:
    """The rendered text up to the end of the last message's content, so that the model goes on there."""
    content = messages[-1]["content"]
    final = content[-1]["text"] if isinstance(content, list) and content else content
    final = final.strip() if isinstance(final, str) else ""
    start = text.rfind(final) if final else -1
    if start < 0:
        raise InvalidInput("continue_final_message", "the final message does not show in the rendered text")
    return text[: start + len(final)]


# -- the environment --------------------------------------------------------------------------------


class _GenerationBlocks(Extension):
    """{% generation %} ... {% endgeneration %}: the body alone."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: the filter that Jinja brings escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _texts(tree: nodes.Template) -> frozenset[str]:
    """Every text constant of the template; the roles it treats apart are among them."""
    return frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template walks through a message's content part by part."""
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    )
