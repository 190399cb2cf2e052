"""Counters of prefix cache use, in tokens, from admission to admission."""

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixCacheStats:
    """Requests admitted for the first time, and apart from them those admitted after a preemption."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    reset: bool = False

    def record(self, *, num_tokens: int, num_hit_tokens: int, preempted: bool) -> None:
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hit_tokens
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hit_tokens
