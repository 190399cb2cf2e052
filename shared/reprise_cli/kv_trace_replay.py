"""Replays recorded runs of a KV cache manager (`reprise conformance kv-traces`).

Every operation is applied to our manager with the recorded inputs, and every recorded output is
compared: returned values, events, block table, and the whole state afterwards.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from reprise_cli.conformance_runner import Difference
from reprise_core.extra_keys import HashInputs, LoraAdapter
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.hash_chain import BlockHasher
from reprise_core.ids import BlockHash, BlockId, RequestId
from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from reprise_scheduler.kv_cache.config import GroupKind, GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager
from reprise_scheduler.kv_cache.request import PrefixHit
from reprise_wire.event_codec import encode_batch

JsonObject = dict[str, Any]


class Unsupported(Exception):
    """The trace needs a kind of group that this manager does not have."""


@dataclass
class TraceRequest:
    """A request as a trace describes it."""

    request_id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    block_hashes: list[BlockHash]
    skip_lookup: bool = False
    report_full: bool = False
    num_preemptions: int = 0
    lora: LoraAdapter | None = None
    cache_salt: str | None = None
    junction_tokens: int = 0
    tenant: str = ""
    hit: PrefixHit | None = None


def kv_config(config: JsonObject) -> KVCacheConfig:
    """The manager's configuration from a trace header's."""
    for group in config["groups"]:
        if group["kind"] not in set(GroupKind):
            raise Unsupported(f"groups of kind {group['kind']!r}")
    names = (
        "num_blocks max_model_len max_in_flight_tokens enable_caching use_eagle num_prefill_lookahead "
        "dcp_world_size watermark retention_interval scheduler_block_size hash_block_size"
    )
    return KVCacheConfig(
        groups=[GroupSpec(**{**group, "kind": GroupKind(group["kind"])}) for group in config["groups"]],
        **{name: config[name] for name in names.split()},
    )


class KvTrace:
    """One kv-trace: its manager, its live requests, and one method per operation."""

    def __init__(self, header: JsonObject) -> None:
        config = header["config"]
        self._manager = KVCacheManager(kv_config(config), enable_events=True)
        self._hash_requests: bool = config["hash_requests"]
        self._hasher = BlockHasher(
            algorithm=HashAlgorithm(header["hash_algo"]),
            block_size=config["hash_block_size"],
            none_hash=BlockHash(bytes.fromhex(header["none_hash"])),
        )
        self._requests: dict[int, TraceRequest] = {}
        self._chains: dict[int, Any] = {}
        self._popped: dict[Any, list[BlockId]] = {}
        self._counters = [0, 0, 0, 0, 0, 0, False]

    def apply(self, line: JsonObject) -> JsonObject:
        """What the operation gives, in the recording's form."""
        operation = getattr(self, "_op_" + line["op"], None)
        if operation is None:
            raise Unsupported(f"operation {line['op']!r}")
        out: JsonObject = operation(line)
        request = self._requests.get(line.get("r", -1))
        if request is not None:
            tables = self._manager.block_ids(request.request_id)
            if any(tables):
                out["tb"] = list(tables)
        events = self._manager.take_events()
        out["ev"] = [_event_to_json(event) for event in events]
        if "wire" in line["out"]:
            out["wire"] = encode_batch(KvEventBatch(line["i"] + 0.5, tuple(events), 0)).hex()
        out["st"] = self._state()
        return out

    def _op_init(self, line: JsonObject) -> JsonObject:
        return {}

    def _op_add(self, line: JsonObject) -> JsonObject:
        lora = LoraAdapter(line["lora"][0], line["lora"][1], line["lora"][2]) if "lora" in line else None
        request = TraceRequest(
            request_id=RequestId(str(line["r"])),
            token_ids=list(line["prompt"]),
            num_prompt_tokens=len(line["prompt"]),
            block_hashes=[],
            skip_lookup=line.get("skip_read", False),
            report_full=line.get("report_full", False),
            lora=lora,
            cache_salt=line.get("salt"),
        )
        self._requests[line["r"]] = request
        if not self._hash_requests:
            return {"bh": []}
        chain = self._hasher.chain(HashInputs(lora=lora, cache_salt=request.cache_salt))
        self._chains[line["r"]] = chain
        new = chain.append(request.token_ids)
        request.block_hashes = chain.hashes
        return {"bh": [block_hash.hex()[:16] for block_hash in new]}

    def _op_append(self, line: JsonObject) -> JsonObject:
        request = self._requests[line["r"]]
        request.token_ids += line["toks"]
        if not self._hash_requests:
            return {"bh": []}
        return {"bh": [h.hex()[:16] for h in self._chains[line["r"]].append(line["toks"])]}

    def _op_lookup(self, line: JsonObject) -> JsonObject:
        request = self._requests[line["r"]]
        request.hit = hit = self._manager.lookup(request)
        blocks = [list(group) for group in hit.blocks]
        return {"hit": hit.num_tokens, "blocks": blocks, "junction": request.junction_tokens}

    def _op_alloc(self, line: JsonObject) -> JsonObject:
        request = self._requests[line["r"]]
        new_blocks = self._manager.allocate(
            request,
            line["new"],
            num_computed_tokens=line["nct"],
            hit=request.hit if line["use_hit"] else None,
            num_external_tokens=line["ext"],
            num_inflight_tokens=line["inflight"],
            num_lookahead_tokens=line["look"],
            delay_caching=line["delay"],
            must_fit=line["fit"],
            reserved_blocks=line["reserve"],
            is_admission=line["status"] in ("waiting", "preempted"),
            others_running=line["busy"],
        )
        return {"nb": new_blocks}

    def _op_record(self, line: JsonObject) -> JsonObject:
        self._manager.record_admission(self._requests[line["r"]], line["hits"])
        return {}

    def _op_cache(self, line: JsonObject) -> JsonObject:
        self._manager.cache_blocks(self._requests[line["r"]], line["n"])
        return {}

    def _op_trim(self, line: JsonObject) -> JsonObject:
        self._manager.trim(self._requests[line["r"]], line["n"])
        return {}

    def _op_free(self, line: JsonObject) -> JsonObject:
        self._manager.free(self._requests[line["r"]])
        self._leave(line)
        return {}

    def _op_pop(self, line: JsonObject) -> JsonObject:
        self._popped[line["key"]] = ids = self._manager.pop_blocks(self._requests[line["r"]])
        self._leave(line)
        return {"ids": list(ids)}

    def _op_free_popped(self, line: JsonObject) -> JsonObject:
        self._manager.free_popped(self._popped.pop(line["key"]))
        return {}

    def _leave(self, line: JsonObject) -> None:
        if line["why"] == "preempt":
            self._requests[line["r"]].num_preemptions += 1
        elif line["why"] in ("finish", "abort"):
            del self._requests[line["r"]]
            self._chains.pop(line["r"], None)

    def _op_evict(self, line: JsonObject) -> JsonObject:
        self._manager.evict(line["ids"])
        return {}

    def _op_reset(self, line: JsonObject) -> JsonObject:
        return {"ok": self._manager.reset()}

    def _op_take_stats(self, line: JsonObject) -> JsonObject:
        self._gather_counters()
        taken, self._counters = self._counters, [0, 0, 0, 0, 0, 0, False]
        return {"taken": taken}

    def _gather_counters(self) -> None:
        """The state shows counters that nobody has taken, but ours are shown by taking them."""
        stats = self._manager.take_stats()
        new = (
            stats.requests,
            stats.queries,
            stats.hits,
            stats.preempted_requests,
            stats.preempted_queries,
            stats.preempted_hits,
        )
        reset = self._counters[6] or stats.reset
        self._counters = [*(a + b for a, b in zip(self._counters[:6], new, strict=True)), reset]

    def _state(self) -> JsonObject:
        self._gather_counters()
        manager = self._manager
        entries = ((i, manager.entries_of(BlockId(i))) for i in range(manager.config.num_blocks))
        return {
            "fq": manager.free_block_ids(),
            "rc": {str(i): n for i, n in enumerate(manager.ref_counts()) if n and i},
            "h": {str(i): [f"{h.hex()[:16]}/{g}" for h, g in found] for i, found in entries if found},
            "u": manager.usage,
            "s": self._counters,
        }


def _event_to_json(event: KvEvent) -> JsonObject:
    match event:
        case BlockStored():
            return {
                "t": "stored",
                "hashes": list(event.block_hashes),
                "parent": event.parent_block_hash,
                "tokens": list(event.token_ids),
                "bs": event.block_size,
                "lora_id": event.lora_id,
                "lora": event.lora_name,
                "medium": event.medium,
                "extra": None
                if event.extra_keys is None
                else [None if keys is None else list(keys) for keys in event.extra_keys],
                "g": event.group_idx,
                "kind": event.kv_cache_spec_kind,
                "window": event.kv_cache_spec_sliding_window,
            }
        case BlockRemoved():
            return {
                "t": "removed",
                "hashes": list(event.block_hashes),
                "medium": event.medium,
                "g": event.group_idx,
            }
        case AllBlocksCleared():
            return {"t": "cleared"}
    raise AssertionError(f"no such event: {event}")


def first_difference(
    operation: str, expected: Mapping[str, Any], got: Mapping[str, Any]
) -> Difference | None:
    """The first recorded field, `st` taken apart, that the replay gives another value for."""
    given_fields = dict(_fields(got))
    for name, value in _fields(expected):
        given = given_fields.get(name)
        if given != value:
            return Difference(operation, name, value, given)
    surplus = set(got) - set(expected)
    if surplus:
        name = sorted(surplus)[0]
        return Difference(operation, name, None, got[name])
    return None


def _fields(out: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in out.items():
        if name == "st":
            yield from _fields(value, "st.")
        elif name == "wire":
            # Decoded: the width of a map header differs between releases of the reference.
            yield name, msgspec.msgpack.decode(bytes.fromhex(value))
        else:
            yield prefix + name, value


def replay_kv_trace(lines: list[JsonObject]) -> Difference | None:
    """Replays a whole trace, the header being line 0. Only an optional trace may be `Unsupported`."""
    header = lines[0]
    try:
        return _first_difference_of(KvTrace(header), lines[1:])
    except Unsupported as reason:
        if header.get("optional"):
            raise
        return Difference("replay", "support", "every kind and operation that is not optional", str(reason))


def _first_difference_of(trace: KvTrace, lines: list[JsonObject]) -> Difference | None:
    for line in lines:
        difference = first_difference(f"line {line['i']} {line['op']}", line["out"], trace.apply(line))
        if difference is not None:
            return difference
    return None
