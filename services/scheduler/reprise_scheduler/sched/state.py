"""Every unfinished request, where it is, and what planning works on: blocks, queues, limits.

The scheduler is this with its parts around it. The parts read it anew each time, for a new session brings
another pool.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from reprise_core.errors import InvalidInput
from reprise_core.ids import GroupId
from reprise_core.requests import FinishReason
from reprise_scheduler.kv_cache.config import KVCacheConfig
from reprise_scheduler.kv_cache.eviction import EvictionPolicy
from reprise_scheduler.kv_cache.group import Group, most_tokens
from reprise_scheduler.kv_cache.manager import KVCacheManager
from reprise_scheduler.kv_cache.miss_reasons import MissKind
from reprise_scheduler.sched.backpressure import DrainRate
from reprise_scheduler.sched.config import SchedulerConfig
from reprise_scheduler.sched.connector import Connector
from reprise_scheduler.sched.fair_queue import FairQueue
from reprise_scheduler.sched.load_gate import LoadGate
from reprise_scheduler.sched.outputs import Counters
from reprise_scheduler.sched.queues import WaitingQueue
from reprise_scheduler.sched.request import Request, RequestStatus

PolicyMaker = Callable[[int], EvictionPolicy]


class EngineState:
    """Invariant: an unfinished request is in exactly one of `waiting`, `running`, `loading`, the connector's
    `looking_up` and the gate's `deferred`."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_config: KVCacheConfig,
        *,
        enable_events: bool,
        integer_hashes: bool,
        enable_connector: bool,
        eos_token_ids: Iterable[int],
        make_policy: PolicyMaker | None,
    ) -> None:
        self.counters = Counters()
        self.lookup_misses: Counter[MissKind] = Counter()
        """Requests admitted for the first time, by why their look-up found no more."""
        self.waiting: WaitingQueue | FairQueue = (
            FairQueue(config.policy, config.tenant_weights)
            if config.tenant_weights
            else WaitingQueue(config.policy)
        )
        self.drain_rate = DrainRate()
        self.num_waiting_tokens = 0
        self.running: dict[int, Request] = {}
        """By sequence, in the order of admission."""
        self.loading: dict[int, Request] = {}
        """By handle. A finished request stays until its load ends, for its blocks are written to."""
        self._enable_events = enable_events
        self._integer_hashes = integer_hashes
        self._enable_connector = enable_connector
        self._make_policy = make_policy
        self._next_handle = 1
        self.removed: list[int] = []
        """Handles that the worker is to forget with the next plan."""
        self.configure(config, kv_config, eos_token_ids)

    def configure(
        self, config: SchedulerConfig, kv_config: KVCacheConfig, eos_token_ids: Iterable[int]
    ) -> None:
        """For a worker that has just registered: every block is empty."""
        unpinned = kv_config.num_blocks - 1 - kv_config.max_pinned_blocks
        if unpinned < 1:
            raise InvalidInput(
                "max_pinned_blocks",
                f"{kv_config.max_pinned_blocks} of {kv_config.num_blocks - 1} blocks leave none to work with",
            )
        kv_config = replace(kv_config, max_in_flight_tokens=config.max_num_batched_tokens)
        # A request that has all but the pinned blocks can always go on: the pool bounds the context.
        groups = [Group(GroupId(number), spec, kv_config) for number, spec in enumerate(kv_config.groups)]
        max_model_len = most_tokens(groups, unpinned, limit_tokens=config.max_model_len)
        if max_model_len < 1:
            raise InvalidInput("num_blocks", f"{unpinned} blocks are too few for {len(groups)} groups")
        if not config.enable_chunked_prefill:
            # Likewise one that has a step to itself must fit into it, however long it was when preempted.
            max_model_len = min(max_model_len, config.max_num_batched_tokens)
        self.config = replace(config, max_model_len=max_model_len)
        self.kv_config = replace(kv_config, max_model_len=max_model_len)
        policy = self._make_policy(kv_config.num_blocks) if self._make_policy is not None else None
        self.manager = KVCacheManager(
            self.kv_config,
            enable_events=self._enable_events,
            integer_hashes=self._integer_hashes,
            mark_reports=True,
            eviction_policy=policy,
        )
        self.connector = Connector(
            config,
            enabled=self._enable_connector,
            block_size=kv_config.hash_block_size,
            groups=self.manager.groups,
            cached=self.manager.block_hashes,
            counters=self.counters,
        )
        self.eos_token_ids = frozenset(eos_token_ids)
        max_blocks = int(config.max_loading_share * (kv_config.num_blocks - 1))
        self.gate = LoadGate(limit_blocks=max(max_blocks, 1), max_loads=config.max_concurrent_loads)
        self.removed = []

    def check_length(self, request: Request) -> None:
        limit = self.config.max_model_len
        if request.num_tokens >= limit:
            raise InvalidInput(
                "prompt",
                f"{request.num_tokens} tokens leave no room for an answer: prompt and answer together"
                f" may have {limit} tokens",
            )

    def enqueue(self, request: Request) -> None:
        self.count_waiting(request, request.num_tokens)
        if not self.connector.ask(request):
            self.waiting.add(request)

    def count_waiting(self, request: Request, num_tokens: int) -> None:
        self.num_waiting_tokens += num_tokens - request.queued_tokens
        request.queued_tokens = num_tokens

    def end(self, request: Request, reason: FinishReason) -> None:
        was_loading = request.status is RequestStatus.LOADING
        self.count_waiting(request, 0)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if was_loading:
            return  # the end of its load gives the blocks back
        self.connector.looking_up.pop(request.sequence, None)
        self.gate.deferred.pop(request.sequence, None)
        self.waiting.remove(request)
        self.take_back(request)

    def take_back(self, request: Request) -> None:
        """The request's place in the worker and its blocks."""
        self.running.pop(request.sequence, None)
        if request.handle:
            self.removed.append(request.handle)
            request.handle = 0
        if request.admitted:
            self.manager.free(request)
            request.admitted = False
            self.let_go(request)
        request.num_computed_tokens = 0

    def let_go(self, request: Request) -> None:
        """The room that the request's load took up is free for others' loads."""
        for other in self.gate.let_go(request):
            self.waiting.add(other)

    def requeue(self, request: Request) -> None:
        """Back to the waiting requests, without blocks: it will be looked up again."""
        self.take_back(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.enqueue(request)

    @property
    def num_waiting(self) -> int:
        apart = len(self.connector.looking_up) + len(self.gate.deferred) + len(self.loading)
        return len(self.waiting) + apart

    def unfinished(self) -> list[Request]:
        loading = [request for request in self.loading.values() if not request.finished]
        apart = [*loading, *self.connector.looking_up.values(), *self.gate.deferred.values()]
        return [*self.running.values(), *self.waiting, *apart]

    def waiting_holders(self) -> list[Request]:
        return [request for request in self.waiting if request.admitted]

    def order(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.waiting.by_priority else 0, request.sequence)

    def take_handle(self) -> int:
        handle = self._next_handle
        self._next_handle += 1
        return handle
