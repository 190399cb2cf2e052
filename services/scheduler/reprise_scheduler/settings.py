"""Settings of the scheduler service, from REPRISE_SCHEDULER_*."""

from typing import Annotated, ClassVar

from pydantic import Field

from reprise_core.hash_algorithms import HashAlgorithm
from reprise_runtime import tracing
from reprise_runtime.settings import settings_config
from reprise_scheduler.sched.config import KvRole, LoadFailurePolicy, SchedulerConfig, SchedulingPolicy
from reprise_scheduler.sched.load_cost import LoadRule

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class SchedulerSettings(tracing.TracedSettings):
    model_config = settings_config("scheduler")
    service: ClassVar[str] = "scheduler"

    engine_id: str = "engine-0"
    engine_index: int = 0
    """Value of the `engine` label, and the data-parallel rank in event batches."""
    listen_address: str = "127.0.0.1:50052"
    metrics_address: str = "127.0.0.1:9203"
    workers_endpoint: str = "tcp://127.0.0.1:5760"
    """Bound; workers connect."""
    publisher_endpoint: str = "tcp://127.0.0.1:5761"
    """The publisher's intake; empty = no events."""
    store_address: str = ""
    """gRPC address of the node's store; empty = no external blocks."""
    tokenizer_address: str = "127.0.0.1:50051"
    namespace: str = "reprise"
    """First part of external keys; the worker's must be the same."""
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_num_waiting: int = Field(default=1024, ge=1)
    max_num_waiting_tokens: int = Field(default=0, ge=0)
    """Tokens of the requests that wait; 0 = no limit."""
    tenant_weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """JSON object: not empty = tenants share the engine by these weights, those not named have 1."""
    tenant_max_priority: dict[str, int] = Field(default_factory=dict)
    """JSON object: the best (lowest) priority that a tenant may ask for; a better one is cut to it."""
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    async_scheduling: bool = True
    must_fit: bool = True
    """Admit a request only when its whole present sequence fits, as the reference does."""
    watermark: float = 0.0
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: HashAlgorithm = HashAlgorithm.SHA256
    eviction_policy: str = ""
    """`module:Class` of an eviction policy; empty = least recently used."""
    tenant_shares: dict[str, Share] = Field(default_factory=dict)
    """JSON object: the part of the pool, 0 to 1, that a tenant's cached blocks may fill before they are
    the first to go; tenants not named may fill all of it."""
    full_prompt_hit: bool = False
    """A prompt whose blocks are all cached computes one token: its last block is copied."""
    verify_tokens: bool = False
    """Keep the tokens of cached blocks and compare them on a hit."""
    track_misses: bool = False
    """Count why look-ups found no more."""
    max_pinned_blocks: int = Field(default=0, ge=0)
    """Blocks that requests' pins may keep; 0 refuses such requests. The context is bounded by the rest
    of the pool."""
    max_external_wait_s: float = 1.0
    max_concurrent_loads: int = 16
    max_loading_share: Share = 0.5
    """The part of the pool, 0 to 1, that loads may fill for requests that do not run yet."""
    load_rule: LoadRule = LoadRule.MEASURED
    """measured: blocks that are faster computed than loaded are computed; always: whatever the store has
    is loaded."""
    tier_events: bool = True
    """Events tell of the store's tiers too."""
    kv_role: KvRole = KvRole.BOTH
    """kv_both, or only save (kv_producer), or only load (kv_consumer)."""
    kv_load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    """recompute, or fail: a request whose load fails ends with an error."""
    worker_timeout_s: float = 5.0
    """A worker that was not heard of for so long is lost."""
    stream_grace_s: float = 5.0
    """How long a gateway's requests go on after its stream broke."""
    event_queue_batches: int = 10_000
    """Event batches that wait for the publisher; one more is dropped and leaves a gap."""
    event_record_blocks: int = Field(default=1_000_000, ge=1)
    """Blocks of all tiers that are remembered for a publisher that asks; about 300 bytes each, as far as
    there are any."""
    event_integer_hashes: bool = True
    """Events name blocks by the low 64 bits of their hashes; False = by all bytes."""

    def scheduler_config(self, *, max_model_len: int, worker_max_tokens: int) -> SchedulerConfig:
        """With the worker's limits: it computes no more tokens in a step than it has room for."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=min(self.max_num_batched_tokens, worker_max_tokens),
            max_model_len=max_model_len,
            max_num_waiting=self.max_num_waiting,
            max_num_waiting_tokens=self.max_num_waiting_tokens,
            tenant_weights=self.tenant_weights,
            tenant_max_priority=self.tenant_max_priority,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            enable_chunked_prefill=self.enable_chunked_prefill,
            policy=self.scheduling_policy,
            must_fit=self.must_fit,
            async_scheduling=self.async_scheduling,
            max_external_wait_s=self.max_external_wait_s,
            max_concurrent_loads=self.max_concurrent_loads,
            max_loading_share=self.max_loading_share,
            load_rule=self.load_rule,
            kv_role=self.kv_role,
            load_failure_policy=self.kv_load_failure_policy,
        )
