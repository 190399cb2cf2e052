"""Prompts to tokens and block hashes, and tokens to text: what runs on the service's threads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reprise_core.errors import FailedPrecondition, InvalidInput
from reprise_tokenizer.chat_template import ChatTemplate, parse_json, parse_messages
from reprise_tokenizer.metrics import TokenizerMetrics
from reprise_tokenizer.model_files import ModelFiles
from reprise_tokenizer.prompt_hashes import PromptHasher
from reprise_tokenizer.settings import TokenizerSettings
from reprise_wire.hash_profiles import HashRequest, ProfileHashes


@dataclass(frozen=True, slots=True)
class Conversation:
    """JSON texts in OpenAI's shape; empty texts mean that there is none."""

    messages_json: str
    tools_json: str = ""
    template_kwargs_json: str = ""
    chat_template: str = ""
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Tokenizing:
    """Thread-safe. Everything here is a function of its inputs and of the model's files."""

    def __init__(self, files: ModelFiles, settings: TokenizerSettings, metrics: TokenizerMetrics) -> None:
        self._files = files
        self._settings = settings
        self._metrics = metrics
        self._hasher = PromptHasher(max_profiles=settings.max_profiles)
        self._template = self._compile(files.chat_template) if files.chat_template else None

    def tokenize(
        self, prompt: str | Conversation, *, add_special_tokens: bool, hashing: HashRequest | None
    ) -> tuple[list[int], list[ProfileHashes]]:
        text = prompt if isinstance(prompt, str) else self._render(prompt)
        token_ids: list[int] = self._files.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        self._metrics.prompt_tokens.inc(len(token_ids))
        return token_ids, self.hash(token_ids, hashing) if hashing is not None else []

    def hash(self, token_ids: Sequence[int], hashing: HashRequest) -> list[ProfileHashes]:
        hashes = self._hasher.hash(token_ids, hashing)
        for profile in dict.fromkeys(hashing.profiles):
            self._metrics.hashed_blocks.inc(len(token_ids) // profile.hash_block_size)
        return hashes

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Ids outside the vocabulary have no text."""
        text: str = self._files.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def _render(self, chat: Conversation) -> str:
        template = self._compile(chat.chat_template) if chat.chat_template else self._template
        if template is None:
            raise FailedPrecondition("this model has no chat template; use plain completions")
        return template.render(
            parse_messages(chat.messages_json),
            tools=_json_list("tools", chat.tools_json),
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            variables=_json_object("chat_template_kwargs", chat.template_kwargs_json),
        )

    def _compile(self, source: str) -> ChatTemplate:
        return ChatTemplate(
            source,
            special_tokens=self._files.special_tokens,
            max_template_bytes=self._settings.max_template_bytes,
            max_rendered_bytes=self._settings.max_rendered_bytes,
            timeout_s=self._settings.template_timeout_s,
            any_role=self._settings.any_role,
        )


def _json_list(field: str, text: str) -> list[Any] | None:
    value = parse_json(field, text) if text else None
    if value is not None and not isinstance(value, list):
        raise InvalidInput(field, "must be a list")
    return value or None


def _json_object(field: str, text: str) -> dict[str, Any]:
    value = parse_json(field, text) if text else {}
    if not isinstance(value, dict):
        raise InvalidInput(field, "must be an object")
    return value
