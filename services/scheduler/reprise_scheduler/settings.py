"""Settings of the scheduler service, from REPRISE_SCHEDULER_*."""

from typing import ClassVar

from reprise_core.hash_algorithms import HashAlgorithm
from reprise_runtime.settings import ServiceSettings, settings_config
from reprise_scheduler.sched.config import SchedulerConfig, SchedulingPolicy


class SchedulerSettings(ServiceSettings):
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
    max_num_waiting: int = 1024
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    async_scheduling: bool = True
    must_fit: bool = False
    watermark: float = 0.0
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: HashAlgorithm = HashAlgorithm.SHA256
    max_external_wait_s: float = 1.0
    max_concurrent_loads: int = 16
    worker_timeout_s: float = 5.0
    """A worker that was not heard of for so long is lost."""
    stream_grace_s: float = 5.0
    """How long a gateway's requests go on after its stream broke."""
    event_queue_batches: int = 10_000
    """Event batches that wait for the publisher; one more is dropped and leaves a gap."""

    def scheduler_config(self, *, max_model_len: int, worker_max_tokens: int) -> SchedulerConfig:
        """With the worker's limits: it computes no more tokens in a step than it has room for."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=min(self.max_num_batched_tokens, worker_max_tokens),
            max_model_len=max_model_len,
            max_num_waiting=self.max_num_waiting,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            enable_chunked_prefill=self.enable_chunked_prefill,
            policy=self.scheduling_policy,
            must_fit=self.must_fit,
            async_scheduling=self.async_scheduling,
            max_external_wait_s=self.max_external_wait_s,
            max_concurrent_loads=self.max_concurrent_loads,
        )
