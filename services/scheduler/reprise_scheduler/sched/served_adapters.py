"""Which of the worker's adapters a request means."""

import re
from collections.abc import Sequence
from dataclasses import replace

from reprise_core.errors import FailedPrecondition, InvalidInput, Unavailable
from reprise_core.extra_keys import LoraAdapter

_DIGEST = re.compile(r"[0-9a-f]{8,128}")


def check_adapters(served: Sequence[LoraAdapter]) -> None:
    """What a worker says that it serves. Raises FailedPrecondition."""
    names = {adapter.name for adapter in served}
    if len(names) < len(served) or "" in names:
        raise FailedPrecondition("the worker's adapters have no names of their own")
    for number, adapter in enumerate(served, 1):
        if adapter.int_id != number:
            raise FailedPrecondition(
                f"adapter {adapter.name!r} has the id {adapter.int_id}, must be {number}"
            )
        if not _DIGEST.fullmatch(adapter.digest):
            # It becomes a part of external keys.
            raise FailedPrecondition(f"adapter {adapter.name!r}: its content has no digest")


def served_adapter(asked: LoraAdapter, served: Sequence[LoraAdapter]) -> LoraAdapter:
    """The one of that name. Raises InvalidInput when there is none, or when path or id are given and are not
    its own, and Unavailable when other content is wanted, which another engine may have."""
    for adapter in served:
        if adapter.name == asked.name:
            break
    else:
        names = ", ".join(repr(adapter.name) for adapter in served)
        allowed = f"must be one of {names}" if names else "not allowed: this engine serves no adapters"
        raise InvalidInput("lora.name", f"{asked.name!r:.300}, {allowed}")
    for field in ("path", "int_id"):
        given, own = getattr(asked, field), getattr(adapter, field)
        if given and given != own:
            raise InvalidInput(
                f"lora.{field}",
                f"{given!r:.300}, must be {own!r} for the adapter {adapter.name!r}, or not given",
            )
    if asked.digest and asked.digest != adapter.digest:
        raise Unavailable(
            f"lora.digest: {asked.digest!r:.300}, the content that this engine serves as {adapter.name!r} has"
            f" {adapter.digest!r}"
        )
    return adapter


def still_served(adapter: LoraAdapter, served: Sequence[LoraAdapter]) -> LoraAdapter:
    """The same content under the same name and path, perhaps with another id. Raises Unavailable."""
    try:
        return served_adapter(replace(adapter, int_id=0), served)
    except InvalidInput as error:
        raise Unavailable(f"the worker does not serve this request's adapter any more: {error}") from error
