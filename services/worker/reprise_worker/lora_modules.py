"""Which adapters a worker is to serve, from the text of its setting."""

import json
from typing import Any, NamedTuple

MAX_ADAPTERS = 64
"""Whoever follows the store's tiers follows those of every adapter."""
_MAX_NAME = 256


class LoraModule(NamedTuple):
    name: str
    path: str


def read_lora_modules(text: str) -> tuple[LoraModule, ...]:
    """`NAME=PATH,NAME=PATH`, or JSON: an object with name and path, or a list of such objects and texts.
    Raises ValueError."""
    modules = tuple(_module(item) for item in _items(text.strip()))
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the name {name!r} is given twice")
    if len(modules) > MAX_ADAPTERS:
        raise ValueError(f"{len(modules)} adapters, at most {MAX_ADAPTERS} are served")
    return modules


def _items(text: str) -> list[Any]:
    if not text.startswith(("[", "{")):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    return value if isinstance(value, list) else [value]


def _module(item: object) -> LoraModule:
    if isinstance(item, str):
        name, equals, path = item.partition("=")
        if not equals:
            raise ValueError(f"{item!r:.80}, must have the form NAME=PATH")
        item = {"name": name.strip(), "path": path.strip()}
    if not isinstance(item, dict) or set(item) != {"name", "path"}:
        raise ValueError(f"{item!r:.80}, must be an object with name and path and nothing else")
    name, path = item["name"], item["path"]
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise ValueError(f"name {name!r:.80}, must be 1 to {_MAX_NAME} printable characters")
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(f"path of {name!r}: {path!r:.80}, must name a folder")
    return LoraModule(name, path)
