"""Options of an engine under the reference's names, as settings of the services that make it up."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reprise_core.errors import InvalidInput
from reprise_wire.events_config import EventsConfig

CONNECTOR = "RepriseConnector"
EVENTS_ON: Mapping[str, object] = {"enable_kv_cache_events": True}
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
_FAILURE_POLICIES = ("recompute", "fail")

Overrides = dict[str, dict[str, str]]
"""Service -> setting name -> value."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What `--kv-transfer-config` says of external blocks."""

    enabled: bool = True
    role: str = "kv_both"
    load_failure_policy: str = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Each field is the setting of that name; the comments tell where names differ."""

    block_size: int
    num_blocks: int  # --num-gpu-blocks-override
    max_model_len: int
    dtype: str
    lora_modules: str
    max_lora_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    enable_chunked_prefill: bool
    scheduling_policy: str
    watermark: float
    must_fit: bool  # --scheduler-reserve-full-isl
    max_num_waiting: int  # --max-num-queued-reqs
    max_num_waiting_tokens: int  # --max-num-queued-tokens
    async_scheduling: bool
    enable_prefix_caching: bool
    prefix_caching_hash_algo: str
    eviction_policy: str = ""
    transfer: Transfer = field(default_factory=Transfer)

    def overrides(self) -> Overrides:
        worker: dict[str, object] = {
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "max_model_len": self.max_model_len,
            "dtype": self.dtype,
            "lora_modules": self.lora_modules,
            "max_lora_rank": self.max_lora_rank,
        }
        own = set(self.__slots__) - set(worker) - {"transfer"}
        scheduler = {name: getattr(self, name) for name in own}
        scheduler["kv_role"] = self.transfer.role
        scheduler["kv_load_failure_policy"] = self.transfer.load_failure_policy
        if not self.transfer.enabled:
            scheduler["store_address"] = worker["store_endpoint"] = ""
        return {"worker": _texts(worker), "scheduler": _texts(scheduler)}


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def read_events_config(text: str) -> Mapping[str, object]:
    """`--kv-events-config`: not given = on; null, {} or an object that does not enable them = off."""
    if not text:
        return EVENTS_ON
    values = _object("kv_events_config", text)
    return values if _checked(values).publishes else {}


def _checked(values: dict[str, Any]) -> EventsConfig:
    try:
        return EventsConfig.from_mapping(values)
    except InvalidInput as error:
        raise InvalidInput("kv_events_config", str(error)) from error


def read_transfer_config(text: str) -> Transfer:
    """`--kv-transfer-config`: not given = the store, both ways; null or {} = off."""
    if not text:
        return Transfer()
    values = _object("kv_transfer_config", text)
    if not values:
        return Transfer(enabled=False)
    known = ("kv_connector", "kv_role", "kv_load_failure_policy")
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise _bad(unknown[0], "not known", known)
    _one_of(values, "kv_connector", None, (CONNECTOR,))
    return Transfer(
        role=_one_of(values, "kv_role", None, _ROLES),
        load_failure_policy=_one_of(values, "kv_load_failure_policy", "recompute", _FAILURE_POLICIES),
    )


def _one_of(values: dict[str, Any], name: str, default: str | None, allowed: tuple[str, ...]) -> str:
    value = values.get(name, default)
    if value not in allowed:
        raise _bad(name, "missing" if value is None else repr(value), allowed)
    return str(value)


def _bad(name: str, problem: str, allowed: tuple[str, ...]) -> InvalidInput:
    return InvalidInput("kv_transfer_config", f"{name}: {problem}, must be one of {', '.join(allowed)}")


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(name, f"{text!r:.60} is not JSON: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise InvalidInput(name, f"{text!r:.60}, must be a JSON object or null")
    return value or {}
