"""An eviction policy by name, `module:Class`."""

import importlib

from reprise_core.errors import InvalidInput
from reprise_scheduler.kv_cache.eviction import EvictionPolicy

REQUIRED = ("add", "remove", "pop", "__len__", "__iter__", "keeps", "entered", "hit", "removed", "clearing")


def load_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """Imports and makes the class, which takes the number of blocks."""
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise InvalidInput("eviction_policy", f"{name!r} must have the form module:Class")
    try:
        made = getattr(importlib.import_module(module_name), class_name)(num_blocks)
    except (ImportError, AttributeError, TypeError) as error:
        raise InvalidInput("eviction_policy", f"{name!r} cannot be used: {error}") from error
    missing = [method for method in REQUIRED if not callable(getattr(made, method, None))]
    if missing:
        raise InvalidInput("eviction_policy", f"{name!r} lacks {', '.join(missing)}; subclass EvictionPolicy")
    policy: EvictionPolicy = made
    return policy
