"""What is counted when a request is admitted, and where its prompt's KV came from."""

from collections.abc import Iterable

from reprise_core.requests import PromptSources
from reprise_scheduler.kv_cache.request import PrefixHit
from reprise_scheduler.sched.request import Request
from reprise_scheduler.sched.state import EngineState


class Admissions:
    def __init__(self, state: EngineState) -> None:
        self._state = state

    def record(self, request: Request, hit: PrefixHit) -> None:
        """Metrics count tokens, at admission; the manager counts preempted requests apart."""
        state = self._state
        request.num_local_hit_tokens = hit.num_tokens
        request.external.load_tokens = 0
        state.manager.record_admission(request, hit.num_tokens)
        if request.miss is not None and request.num_preemptions == 0:
            state.lookup_misses[request.miss.kind] += 1
        if state.connector.loads_for(request) and request.num_preemptions == 0:
            state.counters.external_queried_tokens += request.num_tokens - hit.num_tokens

    def note_sources(self, request: Request, tiers: Iterable[str] = ()) -> None:
        """Where the prompt's KV came from; what a preemption later brings does not change it."""
        if request.prompt_sources is not None:
            return
        left = request.num_prompt_tokens
        by_tier = dict.fromkeys(("device", "host", "disk", "external"), 0)
        per_tier = [("device", request.num_local_hit_tokens)]
        per_tier += [(tier, self._state.kv_config.hash_block_size) for tier in tiers]
        for tier, num_tokens in per_tier:
            counted = min(num_tokens, left)
            by_tier[tier] += counted
            left -= counted
        request.prompt_sources = PromptSources(prompt_tokens=request.num_prompt_tokens, **by_tier)
