"""The limits and choices that scheduling follows."""

from dataclasses import dataclass
from enum import StrEnum


class SchedulingPolicy(StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"


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
    long_prefill_token_threshold: int = 0
    """A prompt gets at most so many tokens of a step; 0 = no limit of its own."""
    enable_chunked_prefill: bool = True
    """Off: a prompt is computed in one step or waits for a step with room."""
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    must_fit: bool = False
    """Admit a request only when its whole present sequence fits."""
    async_scheduling: bool = True
    """Plan the next step while one runs."""
    max_external_wait_s: float = 1.0
    """How long a request waits for the connector's answer before it is computed without it."""
    max_concurrent_loads: int = 16
    max_saves_per_step: int = 64
    max_pending_saves: int = 4096

    @property
    def max_in_flight_steps(self) -> int:
        return 2 if self.async_scheduling else 1
