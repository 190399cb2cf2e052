"""One request's life, as the scheduler sees it.

    WAITING ──► RUNNING ──► FINISHED
       ▲  │        │
       │  ▼        ▼
       │ LOADING  PREEMPTED ──► (WAITING again, looked up again)
       └───┘

LOADING is the reference's WAITING_FOR_REMOTE_KVS: blocks are held, unhashed, until the load ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from reprise_core.extra_keys import LoraAdapter
from reprise_core.hash_chain import HashChain
from reprise_core.ids import BlockHash, RequestId
from reprise_core.requests import FinishReason, PromptSources, SamplingParams
from reprise_core.steps import LoadReport
from reprise_scheduler.kv_cache.miss_reasons import MissReason
from reprise_scheduler.sched.kept_logprobs import KeptLogprobs
from reprise_scheduler.sched.load_cost import LoadSkip
from reprise_scheduler.sched.stored_blocks import NOTHING_STORED, StoredBlocks

MAX_BLOCKS = 1 << 31


class RequestStatus(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True)
class External:
    """What the store has of a request, and what is loaded of it."""

    stored: StoredBlocks = NOTHING_STORED
    """Nothing until the store has answered."""
    wait_until_s: float | None = None
    saves_to_await: int | None = None
    """Of a preempted request: when so many saves are over, the store has more of it than it was asked for."""
    weighed: bool = False
    """Whether it was decided how much of that is loaded."""
    limit_blocks: int = MAX_BLOCKS
    """That much: the most blocks from the front that a load may bring it to."""
    skip: LoadSkip | None = None
    """Why not all of it is."""
    load_tokens: int = 0
    """Tokens of the load in flight or done, after the local hit."""
    load_started_s: float = 0.0
    generation: int | None = None
    """That the load asks for."""
    awaited: set[int] = field(default_factory=set)
    """Groups whose loads have not ended."""
    reports: list[LoadReport] = field(default_factory=list)
    """Of the others."""

    def answer(self, stored: StoredBlocks) -> None:
        """What the store has now; how much of it is loaded is to be decided."""
        self.stored = stored
        self.weighed, self.limit_blocks, self.skip = False, MAX_BLOCKS, None


class Request:
    """Mutable; only the scheduler changes it.

    Invariants: `num_computed_tokens` <= number of tokens + `num_placeholders`; blocks are held only
    while LOADING or RUNNING, or FINISHED with a load still in flight.
    """

    __slots__ = (
        "admitted",
        "arrival_s",
        "block_hashes",
        "cache_salt",
        "chain",
        "external",
        "finish_reason",
        "first_scheduled_s",
        "first_token_s",
        "handle",
        "junction_tokens",
        "last_token_s",
        "logprobs",
        "lora",
        "miss",
        "num_computed_tokens",
        "num_local_hit_tokens",
        "num_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_saved_blocks",
        "owner",
        "pin",
        "pin_ttl_s",
        "priority",
        "prompt_sources",
        "queued_tokens",
        "report_full",
        "request_id",
        "sampling",
        "sequence",
        "status",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        *,
        request_id: RequestId,
        owner: object,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        sampling: SamplingParams,
        chain: HashChain,
        arrival_s: float,
        sequence: int,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
        lora: LoraAdapter | None = None,
        pin: bool = False,
        pin_ttl_s: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.owner = owner
        """Whoever submitted it; handed back with every output."""
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self.sampling = sampling
        self.chain = chain
        self.block_hashes: list[BlockHash] = chain.hashes
        self.arrival_s = arrival_s
        self.sequence = sequence
        self.priority = priority
        self.tenant = tenant
        self.cache_salt = cache_salt
        self.lora = lora
        self.pin = pin
        """Its prompt's blocks are to be kept once they are computed; false again when that was tried."""
        self.pin_ttl_s = pin_ttl_s
        """For how long; 0 = until it is unpinned."""

        self.status = RequestStatus.WAITING
        self.handle = 0
        """The worker's name of it; 0 while the worker does not have it."""
        self.admitted = False
        """Whether it holds blocks; a request that does is not looked up again."""
        self.num_computed_tokens = 0
        self.num_placeholders = 0
        """Output tokens that steps in flight will bring."""
        self.num_preemptions = 0
        self.queued_tokens = 0
        """What it counts for among the waiting tokens; 0 while it does not wait."""
        self.num_saved_blocks = 0
        """Blocks from the front that were offered to the store or are known to be there."""
        self.num_local_hit_tokens = 0
        self.external = External()
        """Anew each time that it is looked up."""
        self.miss: MissReason | None = None
        """Why its last look-up found no more; None unless misses are tracked."""
        self.prompt_sources: PromptSources | None = None
        """Set at the first admission that leads to compute."""
        self.logprobs = KeptLogprobs.of(sampling, first_index=self.num_output_tokens)
        self.finish_reason: FinishReason | None = None
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        # What the cache manager reads beside tokens and hashes.
        self.report_full = False
        self.junction_tokens = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def adapter_id(self) -> int:
        """The worker's number of its adapter; 0 = none."""
        return self.lora.int_id if self.lora is not None else 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def skip_lookup(self) -> bool:
        """Every position of the prompt has to be computed here. They have been once there is a token."""
        return self.sampling.prompt_logprobs is not None and not self.num_output_tokens

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append_output(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.chain.append((token_id,))
