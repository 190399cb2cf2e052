"""Request bodies as values: schema first ("Bad Request", a dotted place), then rules ("BadRequestError")."""

import json
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from reprise_gateway.errors import bad_rule, bad_shape
from reprise_gateway.field_rules import check_refused
from reprise_gateway.logprob_fields import LogprobFields, chat_logprobs, completion_logprobs
from reprise_wire.clients.tokenizer import ChatPrompt

_MAX_UINT32 = 2**32 - 1
_MAX_INT64 = 2**63 - 1
_MAX_TOKEN_ID = 2**31 - 1
_COMPLETION_MAX_TOKENS = 16
_MAX_PIN_TTL_S = 30 * 86_400

Prompt = str | tuple[int, ...] | ChatPrompt
"""Text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """Sampling as asked for; `max_tokens` None = as many as fit."""

    max_tokens: int | None
    max_tokens_field: str
    temperature: float
    top_p: float
    top_k: int
    min_tokens: int
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A completion or chat completion as asked for, checked as far as that goes without the model."""

    chat: bool
    model: str | None
    prompts: tuple[Prompt, ...]
    prompts_listed: bool
    """Whether the prompts came as a list: an error is then of an item of it."""
    sampling: SamplingFields
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    add_special_tokens: bool
    return_token_ids: bool
    cache_salt: str | None
    priority: int
    num_unknown_fields: int
    logprobs: LogprobFields
    cache_pin: bool = False
    """Keep the prompts' blocks."""
    cache_pin_ttl_s: float = 0.0
    """For how long; 0 = until they are unpinned."""
    tenant: str = ""
    """From a header, where that is trusted."""


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    model: str | None
    prompt: str | ChatPrompt
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    model: str | None
    token_ids: tuple[int, ...]


class _StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Fields(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None


class _GenerationFields(_Fields):
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    cache_salt: Any = None
    cache_pin: Any = None
    cache_pin_ttl_s: Any = None
    priority: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    return_tokens_as_token_ids: bool | None = None


class _CompletionFields(_GenerationFields):
    prompt: Any = None
    echo: bool | None = None


class _ChatFields(_GenerationFields):
    messages: Any = None
    top_logprobs: Any = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class _TokenizeFields(_Fields):
    prompt: Any = None
    messages: Any = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class _DetokenizeFields(_Fields):
    tokens: Any = None


F = TypeVar("F", bound=_Fields)


@dataclass(frozen=True, slots=True)
class CallLimits:
    max_choices: int
    max_stop_strings: int
    max_stop_characters: int


def read_completion(body: dict[str, Any], limits: CallLimits) -> GenerationCall:
    fields = _read(_CompletionFields, body)
    num_unknown = check_refused(fields.model_extra or {}, chat=False)
    prompts = _read_prompts(fields.prompt)
    sampling = _read_sampling(
        fields, fields.max_tokens, "max_tokens", limits, default_max_tokens=_COMPLETION_MAX_TOKENS
    )
    return _generation_call(
        fields,
        limits,
        sampling,
        chat=False,
        prompts=prompts,
        prompts_listed=not isinstance(fields.prompt, str),
        echo=bool(fields.echo),
        add_special_tokens=fields.add_special_tokens is not False,
        num_unknown_fields=num_unknown,
        logprobs=completion_logprobs(
            fields.logprobs,
            fields.prompt_logprobs,
            echo=bool(fields.echo),
            stream=bool(fields.stream),
            ids_for_texts=bool(fields.return_tokens_as_token_ids),
        ),
    )


def read_chat(body: dict[str, Any], limits: CallLimits) -> GenerationCall:
    fields = _read(_ChatFields, body)
    num_unknown = check_refused(fields.model_extra or {}, chat=True)
    prompt = _read_chat_prompt(fields)
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    sampling = _read_sampling(fields, getattr(fields, name), name, limits, default_max_tokens=None)
    return _generation_call(
        fields,
        limits,
        sampling,
        chat=True,
        prompts=(prompt,),
        prompts_listed=False,
        echo=False,
        add_special_tokens=bool(fields.add_special_tokens),
        num_unknown_fields=num_unknown,
        logprobs=chat_logprobs(
            fields.logprobs,
            fields.top_logprobs,
            fields.prompt_logprobs,
            stream=bool(fields.stream),
            ids_for_texts=bool(fields.return_tokens_as_token_ids),
        ),
    )


def read_tokenize(body: dict[str, Any]) -> TokenizeCall:
    fields = _read(_TokenizeFields, body)
    if fields.return_token_strs:
        raise bad_rule("return_token_strs", "return_token_strs: true is not supported; allowed: false")
    if fields.messages is not None:
        return TokenizeCall(fields.model, _read_chat_prompt(fields), bool(fields.add_special_tokens))
    if not isinstance(fields.prompt, str):
        shown = "missing" if fields.prompt is None else type(fields.prompt).__name__
        raise bad_shape("body.prompt", f"body.prompt: {shown}, must be text")
    return TokenizeCall(fields.model, fields.prompt, fields.add_special_tokens is not False)


def read_detokenize(body: dict[str, Any]) -> DetokenizeCall:
    fields = _read(_DetokenizeFields, body)
    if not isinstance(fields.tokens, list):
        shown = "missing" if fields.tokens is None else type(fields.tokens).__name__
        raise bad_shape("body.tokens", f"body.tokens: {shown}, must be a list of token ids")
    return DetokenizeCall(fields.model, _token_ids(fields.tokens, "body.tokens"))


# -- schema -----------------------------------------------------------------------------------------


def _read(fields: type[F], body: dict[str, Any]) -> F:
    try:
        return fields.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(["body", *map(str, first["loc"])])
        shown = repr(first["input"])
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise bad_shape(place, f"{place}: {first['msg']}, got {shown}") from error


def _read_prompts(prompt: Any) -> tuple[Prompt, ...]:
    if prompt is None:
        raise bad_rule("prompt", "prompt: missing; text or token ids are needed")
    if isinstance(prompt, str):
        if not prompt:
            raise bad_rule("prompt", "prompt: is empty; at least one token is needed")
        return (prompt,)
    if not isinstance(prompt, list):
        raise bad_shape(
            "body.prompt",
            f"body.prompt: {type(prompt).__name__}, must be text, token ids, or a list of those",
        )
    if not prompt:
        raise bad_rule(None, "prompt: is an empty list; at least one token is needed")
    first = prompt[0]
    if isinstance(first, str):
        return tuple(_listed_text(item, i) for i, item in enumerate(prompt))
    if isinstance(first, list):
        return tuple(_listed_ids(item, i) for i, item in enumerate(prompt))
    return (_token_ids(prompt, "body.prompt"),)


def _listed_text(item: Any, i: int) -> str:
    if not isinstance(item, str):
        raise bad_shape(
            f"body.prompt.{i}", f"body.prompt.{i}: {type(item).__name__}, must be text like the first"
        )
    if not item:
        raise bad_rule(None, f"prompt[{i}]: is empty; at least one token is needed")
    return item


def _listed_ids(item: Any, i: int) -> tuple[int, ...]:
    if not isinstance(item, list):
        raise bad_shape(
            f"body.prompt.{i}", f"body.prompt.{i}: {type(item).__name__}, must be token ids like the first"
        )
    if not item:
        raise bad_rule(None, f"prompt[{i}]: is empty; at least one token is needed")
    return _token_ids(item, f"body.prompt.{i}")


def _token_ids(items: list[Any], place: str) -> tuple[int, ...]:
    for i, item in enumerate(items):
        if type(item) is not int or item < 0:
            raise bad_shape(f"{place}.{i}", f"{place}.{i}: {item!r:.60}, must be a token id of 0 or more")
        if item > _MAX_TOKEN_ID:
            raise bad_rule(None, f"{place.removeprefix('body.')}[{i}]: {item} is outside the vocabulary")
    return tuple(items)


def _read_chat_prompt(fields: _ChatFields | _TokenizeFields) -> ChatPrompt:
    messages = fields.messages
    if not isinstance(messages, list):
        shown = "missing" if messages is None else type(messages).__name__
        raise bad_shape("body.messages", f"body.messages: {shown}, must be a list of messages")
    if not messages:
        raise bad_rule(None, "messages: is empty; at least one message is needed")
    for i, message in enumerate(messages):
        _check_message(message, f"body.messages.{i}")
    continues = bool(fields.continue_final_message)
    generates = fields.add_generation_prompt is not False
    if continues and fields.add_generation_prompt:
        raise bad_rule(
            "continue_final_message", "continue_final_message: true, not allowed with add_generation_prompt"
        )
    try:
        return ChatPrompt(
            messages_json=json.dumps(messages, ensure_ascii=False),
            tools_json=json.dumps(fields.tools, ensure_ascii=False) if fields.tools else "",
            add_generation_prompt=generates and not continues,
            continue_final_message=continues,
            template_kwargs_json=(
                json.dumps(fields.chat_template_kwargs) if fields.chat_template_kwargs else ""
            ),
        )
    except RecursionError as error:
        raise bad_shape("body", "body: nested too deeply") from error


def _check_message(message: Any, place: str) -> None:
    if not isinstance(message, dict):
        raise bad_shape(place, f"{place}: {type(message).__name__}, must be an object")
    if not isinstance(message.get("role"), str):
        # The reference names the first of its message types in this place, and clients may look for it.
        raise bad_shape(
            f"{place}.ChatCompletionDeveloperMessageParam.role",
            f"{place}.role: {message.get('role', 'missing')!r:.60}, must be text",
        )


# -- rules ------------------------------------------------------------------------------------------


def _read_sampling(
    fields: _GenerationFields,
    max_tokens: int | None,
    max_tokens_field: str,
    limits: CallLimits,
    *,
    default_max_tokens: int | None,
) -> SamplingFields:
    stop = _read_stop(fields.stop, limits)
    if max_tokens is not None and max_tokens < 1:
        raise bad_rule(max_tokens_field, f"{max_tokens_field}: {max_tokens}, must be at least 1")
    min_tokens = fields.min_tokens or 0
    if not 0 <= min_tokens <= _MAX_UINT32:
        raise bad_rule("min_tokens", f"min_tokens: {min_tokens}, must be at least 0")
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_rule("min_tokens", f"min_tokens: {min_tokens}, must be at most max_tokens ({max_tokens})")
    stop_token_ids = tuple(fields.stop_token_ids or ())
    for i, token_id in enumerate(stop_token_ids):
        if not 0 <= token_id <= _MAX_TOKEN_ID:
            raise bad_rule(
                "stop_token_ids", f"stop_token_ids[{i}]: {token_id}, must be a token id of 0 or more"
            )
    return SamplingFields(
        max_tokens=max_tokens if max_tokens is not None else default_max_tokens,
        max_tokens_field=max_tokens_field,
        temperature=_temperature(fields.temperature),
        top_p=_top_p(fields.top_p),
        top_k=_top_k(fields.top_k),
        min_tokens=min_tokens,
        seed=_seed(fields.seed),
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(fields.ignore_eos),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
    )


def _temperature(value: float | None) -> float:
    if value is None:
        return 1.0
    if not math.isfinite(value) or value < 0:
        raise bad_rule("temperature", f"temperature: {value}, must be 0 or more")
    return value


def _top_p(value: float | None) -> float:
    if value is None:
        return 1.0
    if not 0 < value <= 1:
        raise bad_rule("top_p", f"top_p: {value}, must be above 0 and at most 1")
    return value


def _top_k(value: int | None) -> int:
    """0 and -1 are off."""
    if value is None:
        return 0
    if not -1 <= value <= _MAX_UINT32:
        raise bad_rule(None, f"top_k: {value}, must be at least 1, or 0 or -1 for off")
    return max(0, value)


def _seed(value: int | None) -> int | None:
    if value is not None and not -_MAX_INT64 - 1 <= value <= _MAX_INT64:
        raise bad_rule("seed", f"seed: {value}, must fit in 64 bits")
    return value


def _read_stop(value: Any, limits: CallLimits) -> tuple[str, ...]:
    if value is None:
        return ()
    stop = [value] if isinstance(value, str) else value
    if not isinstance(stop, list) or not all(isinstance(one, str) for one in stop):
        raise bad_shape("body.stop", f"body.stop: {value!r:.60}, must be text or a list of texts")
    if len(stop) > limits.max_stop_strings:
        raise bad_rule("stop", f"stop: {len(stop)} texts, at most {limits.max_stop_strings} are allowed")
    for i, one in enumerate(stop):
        if not one:
            raise bad_rule("stop", f"stop[{i}]: is empty")
        if len(one) > limits.max_stop_characters:
            raise bad_rule(
                "stop", f"stop[{i}]: {len(one)} characters, at most {limits.max_stop_characters} are allowed"
            )
    return tuple(stop)


def _cache_salt(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise bad_rule("cache_salt", f"cache_salt: {value!r:.60}, must be text that is not empty")
    return value


def _cache_pin(value: Any) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad_rule("cache_pin", f"cache_pin: {value!r:.60}, must be true or false")
    return value


def _cache_pin_ttl(fields: _GenerationFields) -> float:
    value = fields.cache_pin_ttl_s
    if value is None:
        return 0.0
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value <= _MAX_PIN_TTL_S:
        raise bad_rule(
            "cache_pin_ttl_s",
            f"cache_pin_ttl_s: {value!r:.60}, must be a number of seconds above 0 and at most"
            f" {_MAX_PIN_TTL_S}",
        )
    if not fields.cache_pin:
        raise bad_rule("cache_pin_ttl_s", "cache_pin_ttl_s: only allowed with cache_pin true")
    return float(value)


def _generation_call(
    fields: _GenerationFields,
    limits: CallLimits,
    sampling: SamplingFields,
    *,
    chat: Literal[True, False],
    prompts: tuple[Prompt, ...],
    prompts_listed: bool,
    echo: bool,
    add_special_tokens: bool,
    num_unknown_fields: int,
    logprobs: LogprobFields,
) -> GenerationCall:
    n = 1 if fields.n is None else fields.n
    if n < 1:
        raise bad_rule(None, f"n: {n}, must be at least 1")
    if n * len(prompts) > limits.max_choices:
        raise bad_rule(
            "n", f"n: {n} for {len(prompts)} prompts, at most {limits.max_choices} answers are allowed"
        )
    if n > 1 and sampling.temperature == 0:
        raise bad_rule("n", f"n: {n}, must be 1 with temperature 0: the answers would all be the same")
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise bad_rule("stream_options", "stream_options: only allowed with stream true")
    priority = fields.priority or 0
    if not -(2**31) <= priority < 2**31:
        raise bad_rule("priority", f"priority: {priority}, must fit in 32 bits")
    return GenerationCall(
        chat=chat,
        model=fields.model,
        prompts=prompts,
        prompts_listed=prompts_listed,
        sampling=sampling,
        n=n,
        stream=bool(fields.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None
        and bool(options.include_usage)
        and bool(options.continuous_usage_stats),
        echo=echo,
        add_special_tokens=add_special_tokens,
        return_token_ids=bool(fields.return_token_ids),
        cache_salt=_cache_salt(fields.cache_salt),
        priority=priority,
        num_unknown_fields=num_unknown_fields,
        cache_pin=_cache_pin(fields.cache_pin),
        cache_pin_ttl_s=_cache_pin_ttl(fields),
        logprobs=logprobs,
    )
