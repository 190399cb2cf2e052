"""Replays `pool_trace.jsonl`: recorded runs of a cache manager with one full-attention group."""

from dataclasses import asdict
from typing import Any

import msgspec

from reprise_cli.conformance_runner import Difference
from reprise_cli.kv_trace_replay import JsonObject, TraceRequest, first_difference
from reprise_core.extra_keys import HashInputs, LoraAdapter
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.hash_chain import BlockHasher, HashChain
from reprise_core.ids import BlockHash, BlockId, RequestId
from reprise_core.kv_events import BlockStored, KvEvent
from reprise_scheduler.kv_cache.config import GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager

INPUTS = {
    "new": "op request token_ids cache_salt lora skip_reading report_mode",
    "admit": "op request num_new_tokens",
    "step": "op request num_new_tokens append",
    "preempt": "op request",
    "free": "op request",
    "evict": "op block_ids",
    "reset": "op",
}


class PoolTrace:
    """One trace: its manager, its requests, and one method per operation."""

    def __init__(self, trace: JsonObject) -> None:
        size = trace["block_size"]
        config = KVCacheConfig(num_blocks=trace["num_blocks"], groups=[GroupSpec(block_size=size)])
        self._manager = KVCacheManager(config, enable_events=True)
        self._hasher = BlockHasher(
            algorithm=HashAlgorithm(trace["algo"]),
            block_size=size,
            none_hash=BlockHash(bytes.fromhex(trace["none_hash"])),
        )
        self._requests: dict[str, TraceRequest] = {}
        self._chains: dict[str, HashChain] = {}
        self._num_computed: dict[str, int] = {}

    def apply(self, line: JsonObject) -> JsonObject:
        operation = getattr(self, "_op_" + line["op"])
        out: JsonObject = operation(line)
        if line["op"] != "new":
            events = [_event_to_json(event) for event in self._manager.take_events()]
            if line["op"] == "evict":  # The order of these is not defined.
                events.sort(key=str)
            out["events"] = events
            out |= self._state()
        return out

    def _op_new(self, line: JsonObject) -> JsonObject:
        lora = LoraAdapter(line["lora"][0], line["lora"][1], line["lora"][2]) if line["lora"] else None
        chain = self._hasher.chain(HashInputs(lora=lora, cache_salt=line["cache_salt"]))
        chain.append(line["token_ids"])
        name = line["request"]
        self._chains[name] = chain
        self._num_computed[name] = 0
        self._requests[name] = TraceRequest(
            request_id=RequestId(name),
            token_ids=list(line["token_ids"]),
            num_prompt_tokens=len(line["token_ids"]),
            block_hashes=chain.hashes,
            skip_lookup=line["skip_reading"],
            report_full=line["report_mode"] == "full",
            lora=lora,
            cache_salt=line["cache_salt"],
        )
        return {"block_hashes": [block_hash.hex() for block_hash in chain.hashes]}

    def _op_admit(self, line: JsonObject) -> JsonObject:
        request = self._requests[line["request"]]
        hit = self._manager.lookup(request)
        out: JsonObject = {"hit_tokens": hit.num_tokens, "hit_blocks": list(hit.blocks[0])}
        new_blocks = self._manager.allocate(request, line["num_new_tokens"], num_computed_tokens=0, hit=hit)
        if new_blocks is None:
            return {**out, "result": "no space"}
        self._manager.record_admission(request, hit.num_tokens)
        self._num_computed[line["request"]] = hit.num_tokens + line["num_new_tokens"]
        return {**out, **self._given(request, new_blocks)}

    def _op_step(self, line: JsonObject) -> JsonObject:
        request = self._requests[line["request"]]
        request.token_ids += line.get("append", [])
        self._chains[line["request"]].append(line.get("append", []))
        new_blocks = self._manager.allocate(
            request, line["num_new_tokens"], num_computed_tokens=self._num_computed[line["request"]]
        )
        if new_blocks is None:
            return {"result": "no space"}
        self._num_computed[line["request"]] += line["num_new_tokens"]
        return self._given(request, new_blocks)

    def _given(self, request: TraceRequest, new_blocks: list[list[BlockId]]) -> JsonObject:
        return {
            "new_blocks": new_blocks[0],
            "block_ids": self._manager.block_ids(request.request_id)[0],
        }

    def _op_preempt(self, line: JsonObject) -> JsonObject:
        request = self._requests[line["request"]]
        self._manager.free(request)
        request.num_preemptions += 1
        self._num_computed[line["request"]] = 0
        return {}

    def _op_free(self, line: JsonObject) -> JsonObject:
        self._manager.free(self._requests[line["request"]])
        return {}

    def _op_evict(self, line: JsonObject) -> JsonObject:
        self._manager.evict(line["block_ids"])
        return {}

    def _op_reset(self, line: JsonObject) -> JsonObject:
        return {"success": self._manager.reset()}

    def _state(self) -> JsonObject:
        manager = self._manager
        hashed = {}
        for i in range(manager.config.num_blocks):
            for block_hash, group_id in manager.entries_of(BlockId(i)):
                hashed[str(i)] = f"{block_hash.hex()[:16]}:{group_id}"
        state: JsonObject = {
            "free_queue": manager.free_block_ids(),
            "ref_counts": {str(i): n for i, n in enumerate(manager.ref_counts()) if n},
            "hashed_blocks": hashed,
            "usage": manager.usage,
        }
        stats = asdict(manager.take_stats())
        if stats["requests"] or stats["preempted_requests"]:
            del stats["reset"]
            state["stats"] = stats
        return state


def _event_to_json(event: KvEvent) -> JsonObject:
    """Null fields are left out, except the parent."""
    fields: JsonObject = msgspec.to_builtins(event)
    keep = {"parent_block_hash"} if isinstance(event, BlockStored) else set()
    return {name: _listed(value) for name, value in fields.items() if value is not None or name in keep}


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def replay_pool_trace(trace: JsonObject) -> Difference | None:
    """Replays every operation of a trace; the fields that are not inputs are compared."""
    replay = PoolTrace(trace)
    for number, line in enumerate(trace["ops"]):
        inputs = INPUTS[line["op"]].split()
        expected = {name: value for name, value in line.items() if name not in inputs}
        if line["op"] == "evict":
            expected["events"] = sorted(expected["events"], key=str)
        name = " ".join(filter(None, [f"operation {number}", line["op"], line.get("request")]))
        difference = first_difference(name, expected, replay.apply(line))
        if difference is not None:
            return difference
    return None
