"""The limits and choices that scheduling follows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from reprise_scheduler.sched.load_cost import LoadRule


class SchedulingPolicy(StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"


class KvRole(StrEnum):
    """What an engine does with external blocks: save and load, only save, only load."""

    BOTH = "kv_both"
    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"


class LoadFailurePolicy(StrEnum):
    """What a load that fails means for its request."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int = 128
    """Requests in the running set."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step."""
    max_model_len: int = 2048
    """Prompt and output together; at most what the pool can hold."""
    max_num_waiting: int = 1024
    """Requests that wait; one more is refused."""
    max_num_waiting_tokens: int = 0
    """Tokens of the requests that wait; 0 = no limit. A request that finds nothing waiting is taken."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Not empty: tenants are served by their weights, those not named by 1."""
    tenant_max_priority: Mapping[str, int] = field(default_factory=dict)
    """The best (lowest) priority that a tenant may have."""
    long_prefill_token_threshold: int = 0
    """A prompt gets at most so many tokens of a step; 0 = no limit of its own."""
    enable_chunked_prefill: bool = True
    """Off: a prompt is computed in one step or waits for a step with room; the context is then no longer
    than a step, and the threshold above means nothing."""
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    must_fit: bool = True
    """Admit a request only when its whole present sequence fits, and not when its first chunk does: one
    that cannot finish its prompt only takes blocks from those that run. On by default, as in the reference
    (`--scheduler-reserve-full-isl`)."""
    async_scheduling: bool = True
    """Plan the next step while one runs."""
    max_external_wait_s: float = 1.0
    """How long a request waits for the connector's answer before it is computed without it."""
    max_concurrent_loads: int = 16
    max_loading_share: float = 0.5
    """The part of the pool that loads may fill for requests that do not run yet."""
    load_rule: LoadRule = LoadRule.MEASURED
    kv_role: KvRole = KvRole.BOTH
    load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    max_saves_per_step: int = 64
    max_pending_saves: int = 4096

    @property
    def max_in_flight_steps(self) -> int:
        return 2 if self.async_scheduling else 1
