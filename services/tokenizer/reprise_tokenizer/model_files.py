"""A model's tokenizer as its folder describes it. Broken files end the start with one clear sentence."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from reprise_core.errors import InvalidInput

SPECIAL_TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`special_tokens` maps bos_token and the like to their text; they are template variables."""

    tokenizer: Tokenizer
    decoder: dict[str, Any] | None
    chat_template: str | None
    special_tokens: dict[str, str]
    special_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def load_model_files(folder: Path) -> ModelFiles:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidInput("model_path", f"{folder} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any damage
        raise InvalidInput("model_path", f"{path} is no tokenizer: {error}") from error
    # Limits of the training set-up; a prompt is never cut or filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
    added = tokenizer.get_added_tokens_decoder()
    bos = special_tokens.get("bos_token")
    return ModelFiles(
        tokenizer=tokenizer,
        decoder=_read_json(path).get("decoder"),
        chat_template=_chat_template(folder, config),
        special_tokens=special_tokens,
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        eos_token_ids=_eos_ids(tokenizer, special_tokens, _read_json(folder / "generation_config.json")),
        bos_token_id=tokenizer.token_to_id(bos) if bos else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidInput("model_path", f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInput("model_path", f"{path} holds no JSON object")
    return value


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """The first source that names a token wins; a token is a text, or an object with `content`."""
    found: dict[str, str] = {}
    for source in sources:
        for name in SPECIAL_TOKEN_NAMES:
            token = source.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found.setdefault(name, text)
    return found


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {one["name"]: one["template"] for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _eos_ids(
    tokenizer: Tokenizer, special_tokens: dict[str, str], generation_config: dict[str, Any]
) -> tuple[int, ...]:
    ids = generation_config.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    eos = special_tokens.get("eos_token")
    own = tokenizer.token_to_id(eos) if eos else None
    return tuple(dict.fromkeys([*([] if own is None else [own]), *listed]))
