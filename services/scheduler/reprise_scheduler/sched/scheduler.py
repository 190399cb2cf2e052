"""Plan steps and apply their results. Pure: time comes in as an argument, plans go out as values.

One plan covers first the running requests (one token each, or the next chunk of a prompt) and then
waiting ones, while there is budget and blocks. When blocks run short a running request is
preempted: the one that is served last. With `async_scheduling` a plan may be made before the result
of the one before is known; a token to come is a placeholder, and a block that it fills gets its hash
when the token is known. Plans are executed in order, so a block that is taken back from a step in
flight can be handed out again at once.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from reprise_core.errors import ErrorKind, InvalidInput
from reprise_core.ids import BlockId
from reprise_core.kv_events import KvEvent
from reprise_core.requests import FinishReason, PromptSources
from reprise_core.steps import (
    AddedRequest,
    BlockLoad,
    BlockSave,
    LoadReport,
    ScheduledRequest,
    StepPlan,
    StepResult,
    pack_ids,
    unpack_ids,
)
from reprise_scheduler.kv_cache.config import KVCacheConfig
from reprise_scheduler.kv_cache.eviction import EvictionPolicy
from reprise_scheduler.kv_cache.manager import KVCacheManager
from reprise_scheduler.kv_cache.miss_reasons import MissKind
from reprise_scheduler.kv_cache.pins import Pin
from reprise_scheduler.kv_cache.request import PrefixHit
from reprise_scheduler.sched.backpressure import DrainRate, QueueFull, QueueLimit
from reprise_scheduler.sched.config import LoadFailurePolicy, SchedulerConfig
from reprise_scheduler.sched.connector import NULL_BLOCK, Connector
from reprise_scheduler.sched.draft import Draft, InFlightStep, ScheduledPart, added_message
from reprise_scheduler.sched.fair_queue import FairQueue
from reprise_scheduler.sched.outputs import Counters, Output
from reprise_scheduler.sched.queues import WaitingQueue
from reprise_scheduler.sched.request import Request, RequestStatus
from reprise_scheduler.sched.stopping import end_of

PolicyMaker = Callable[[int], EvictionPolicy]


@dataclass(frozen=True, slots=True)
class _ManagerSums:
    """What the managers of earlier sessions counted."""

    collisions: int = 0
    pins_refused: int = 0


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        kv_config: KVCacheConfig,
        *,
        enable_events: bool = True,
        enable_connector: bool = False,
        eos_token_ids: Iterable[int] = (),
        make_policy: PolicyMaker | None = None,
    ) -> None:
        """`make_policy` is called with the number of blocks for each pool; None = least recently used."""
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
        self._enable_connector = enable_connector
        self._make_policy = make_policy
        self._past = _ManagerSums()
        self._next_handle = 1
        self._lost_events: list[KvEvent] = []
        self._configure(config, kv_config, eos_token_ids)

    def _configure(
        self, config: SchedulerConfig, kv_config: KVCacheConfig, eos_token_ids: Iterable[int]
    ) -> None:
        unpinned = kv_config.num_blocks - 1 - kv_config.max_pinned_blocks
        if unpinned < 1:
            raise InvalidInput(
                "max_pinned_blocks",
                f"{kv_config.max_pinned_blocks} of {kv_config.num_blocks - 1} blocks leave none to work with",
            )
        pool_tokens = unpinned * min(group.block_size for group in kv_config.groups)
        # A request that has all but the pinned blocks can always go on: the pool bounds the context.
        max_model_len = min(config.max_model_len, pool_tokens)
        if not config.enable_chunked_prefill:
            # Likewise one that has a step to itself must fit into it, however long it was when preempted.
            max_model_len = min(max_model_len, config.max_num_batched_tokens)
        self.config = replace(config, max_model_len=max_model_len)
        self.kv_config = replace(kv_config, max_model_len=max_model_len)
        policy = self._make_policy(kv_config.num_blocks) if self._make_policy is not None else None
        self.manager = KVCacheManager(
            self.kv_config, enable_events=self._enable_events, eviction_policy=policy
        )
        self.connector = Connector(
            config,
            enabled=self._enable_connector,
            block_size=kv_config.hash_block_size,
            num_groups=len(kv_config.groups),
            counters=self.counters,
        )
        self._eos_token_ids = frozenset(eos_token_ids)
        self._step_id = 0
        self._in_flight: deque[InFlightStep] = deque()
        self._removed: list[int] = []

    # -- requests in and out ------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Raises InvalidInput for what can never run, QueueFull when too many wait."""
        self._check_length(request)
        self._check_room(request)
        best = self.config.tenant_max_priority.get(request.tenant)
        if best is not None and request.priority < best:
            request.priority = best
            self.counters.priority_cuts += 1
        if not self.num_waiting:
            self.drain_rate.backlog_began(request.arrival_s)
        self._enqueue(request)

    def _check_room(self, request: Request) -> None:
        num_waiting, num_tokens = self.num_waiting, self.num_waiting_tokens + request.num_tokens
        config = self.config
        if num_waiting >= config.max_num_waiting:
            limit = QueueLimit.REQUESTS
            problem = f"{num_waiting} requests wait, at most {config.max_num_waiting} may"
        elif num_waiting and 0 < config.max_num_waiting_tokens < num_tokens:
            limit = QueueLimit.TOKENS
            problem = f"{num_tokens} tokens would wait, at most {config.max_num_waiting_tokens} may"
        else:
            return
        retry_after_s = self.drain_rate.retry_after_s(num_waiting, request.arrival_s)
        raise QueueFull(limit, problem, retry_after_s=retry_after_s)

    def _check_length(self, request: Request) -> None:
        limit = self.config.max_model_len
        if request.num_tokens >= limit:
            raise InvalidInput(
                "prompt",
                f"{request.num_tokens} tokens leave no room for an answer: prompt and answer together"
                f" may have {limit} tokens",
            )

    def _enqueue(self, request: Request) -> None:
        self._count_waiting(request, request.num_tokens)
        if not self.connector.ask(request):
            self.waiting.add(request)

    def _count_waiting(self, request: Request, num_tokens: int) -> None:
        self.num_waiting_tokens += num_tokens - request.queued_tokens
        request.queued_tokens = num_tokens

    def finish(self, request: Request, reason: FinishReason, *, num_output_tokens: int | None = None) -> None:
        """End a request from outside: aborted, or its caller has what it needs. Idempotent.

        A plan already sent is executed as sent; the request is left out from the next on.
        """
        if request.finished:
            return
        if num_output_tokens is not None:
            del request.token_ids[request.num_prompt_tokens + max(num_output_tokens, 0) :]
        self._end(request, reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        was_loading = request.status is RequestStatus.LOADING
        self._count_waiting(request, 0)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if was_loading:
            return  # end_load gives the blocks back
        self.connector.looking_up.pop(request.sequence, None)
        self.waiting.remove(request)
        self._take_back(request)

    def _take_back(self, request: Request) -> None:
        """The request's place in the worker and its blocks."""
        self.running.pop(request.sequence, None)
        if request.handle:
            self._removed.append(request.handle)
            request.handle = 0
        if request.admitted:
            self.manager.free(request)
            request.admitted = False
        request.num_computed_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.connector.looking_up) + len(self.loading)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def unfinished(self) -> list[Request]:
        loading = [request for request in self.loading.values() if not request.finished]
        return [*self.running.values(), *loading, *self.waiting, *self.connector.looking_up.values()]

    def answer_lookup(
        self, request: Request, attempt: int, tiers: Iterable[str], generation: int | None
    ) -> None:
        """The store's answer to one of `connector.take_lookups`."""
        if self.connector.answer(request, attempt, tuple(tiers), generation):
            self.waiting.add(request)

    # -- planning -----------------------------------------------------------------------------

    def plan_step(self, *, now_s: float) -> StepPlan | None:
        """The next plan, or None when there is nothing to do or as many are in flight as may be."""
        for request in self.connector.expire(now_s):
            self.waiting.add(request)
        self.manager.expire_pins(now_s)
        if len(self._in_flight) >= self.config.max_in_flight_steps:
            return None
        # Taken before this plan hands out any block: one that still has its hash now was filled by an
        # earlier plan. Later it might be a block that this plan is to fill with the same tokens.
        saves = self.connector.take_saves(self.config.max_saves_per_step, self.manager.block_hash_of)
        draft = Draft(budget=self.config.max_num_batched_tokens)
        self._plan_running(draft)
        if not draft.preempted:
            self._plan_waiting(draft, now_s)
        return self._seal(draft, saves)

    def _plan_running(self, draft: Draft) -> None:
        for request in list(self.running.values()):
            if draft.budget <= 0:
                return
            if request.sequence not in self.running:
                continue  # preempted for one that is served earlier
            num_new = self._num_new_tokens(request, draft.budget)
            if num_new > 0:
                self._schedule_running(draft, request, num_new)

    def _schedule_running(self, draft: Draft, request: Request, num_new: int) -> None:
        while True:
            new_blocks = self.manager.allocate(
                request, num_new, num_computed_tokens=request.num_computed_tokens
            )
            if new_blocks is not None:
                self._schedule(draft, request, num_new, new_blocks)
                return
            victim = self._victim()
            self._preempt(draft, victim)
            if victim is request:
                return

    def _num_new_tokens(self, request: Request, budget: int) -> int:
        num_new = len(request.token_ids) + request.num_placeholders - request.num_computed_tokens
        if request.num_placeholders and self._ends_with_placeholders(request):
            return 0
        return self._cap(num_new, budget)

    def _cap(self, num_new: int, budget: int) -> int:
        threshold = self.config.long_prefill_token_threshold if self.config.enable_chunked_prefill else 0
        return min(num_new, budget, threshold) if threshold > 0 else min(num_new, budget)

    def _ends_with_placeholders(self, request: Request) -> bool:
        """Whether the tokens in flight are the last ones: nothing is to be computed after them."""
        to_come = request.num_output_tokens + request.num_placeholders
        num_tokens = len(request.token_ids) + request.num_placeholders
        return to_come >= request.sampling.max_tokens or num_tokens >= self.config.max_model_len

    def _victim(self) -> Request:
        """Of those that hold blocks, the one that is served last: the lowest priority, then the latest.

        A request whose load is done holds blocks while it waits. The first in order is never chosen
        while another holds any, so it gets on.
        """
        return max((*self.running.values(), *self._waiting_holders()), key=self._order)

    def _order(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.waiting.by_priority else 0, request.sequence)

    def _waiting_holders(self) -> list[Request]:
        return [request for request in self.waiting if request.admitted]

    def _preempt(self, draft: Draft | None, victim: Request) -> None:
        self.counters.preemptions += 1
        if draft is not None:
            draft.preempted = True
            undone = draft.scheduled.pop(victim.sequence, None)
            if undone is not None:
                draft.budget += undone.num_new_tokens
                self._unhash_uncomputed(victim)
        self.waiting.remove(victim)
        self._requeue(victim)

    def _unhash_uncomputed(self, request: Request) -> None:
        """Blocks that the withdrawn part of the plan would have filled must not be found as cached."""
        first = request.num_computed_tokens // self.kv_config.hash_block_size
        for table in self.manager.block_ids(request.request_id):
            self.manager.evict(table[first:])

    def _requeue(self, request: Request) -> None:
        """Back to the waiting requests, without blocks: it will be looked up again."""
        self._take_back(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._enqueue(request)

    def _plan_waiting(self, draft: Draft, now_s: float) -> None:
        while draft.budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            # A preempted request is resumed only when the tokens of steps in flight are back.
            if request is None or request.num_placeholders:
                return
            if not self._plan_head(draft, request, now_s) and not self._make_room(draft, request):
                return

    def _plan_head(self, draft: Draft, request: Request, now_s: float) -> bool:
        """Whether the first waiting request could be admitted, or its load started."""
        if request.admitted:  # its load is done
            return self._admit(draft, request, None, now_s)
        hit = self.manager.lookup(request)
        if hit.copy_sources and not self._filled_before(draft, hit.copy_sources):
            hit = self.manager.lookup(request, allow_copy=False)
        if self.kv_config.track_misses:
            request.miss = self.manager.explain_miss(request, hit)
        num_external = self.connector.external_tokens(request, hit.num_tokens)
        if not num_external:
            return self._admit(draft, request, hit, now_s)
        if len(self.loading) >= self.config.max_concurrent_loads:
            return False
        return self._start_load(draft, request, hit, num_external)

    def _filled_before(self, draft: Draft, block_ids: Iterable[BlockId]) -> bool:
        """Whether earlier plans fill these blocks: copies are made before this plan computes anything."""
        filling: set[BlockId] = set()
        for part in draft.scheduled.values():
            request = part.request
            for group, table in zip(
                self.kv_config.groups, self.manager.block_ids(request.request_id), strict=True
            ):
                filling.update(table[request.num_computed_tokens // group.block_size :])
        return filling.isdisjoint(block_ids)

    def _admit(self, draft: Draft, request: Request, hit: PrefixHit | None, now_s: float) -> bool:
        num_local = hit.num_tokens if hit is not None else 0
        num_computed = request.num_computed_tokens + num_local
        wanted = request.num_tokens - num_computed
        num_new = self._cap(wanted, draft.budget)
        if not self.config.enable_chunked_prefill and num_new < wanted:
            return False
        new_blocks = self.manager.allocate(
            request,
            num_new,
            num_computed_tokens=request.num_computed_tokens,
            hit=hit,
            must_fit=self.config.must_fit,
            is_admission=True,
            others_running=bool(self.running),
        )
        if new_blocks is None:
            return False
        self.waiting.pop()
        if hit is not None:
            self._record_admission(request, hit)
            self._note_sources(request)
        request.admitted = True
        request.num_computed_tokens = num_computed
        request.status = RequestStatus.RUNNING
        self._count_waiting(request, 0)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
            self.drain_rate.left(now_s)
        request.handle = self._take_handle()
        self.running[request.sequence] = request
        self._schedule(draft, request, num_new, new_blocks, added=True)
        return True

    def _record_admission(self, request: Request, hit: PrefixHit) -> None:
        """Metrics count tokens, at admission; the manager counts preempted requests apart."""
        request.num_local_hit_tokens = hit.num_tokens
        request.load_tokens = 0
        self.manager.record_admission(request, hit.num_tokens)
        if request.miss is not None and request.num_preemptions == 0:
            self.lookup_misses[request.miss.kind] += 1
        if self.connector.enabled and request.num_preemptions == 0:
            self.counters.external_queried_tokens += request.num_tokens - hit.num_tokens

    def _note_sources(self, request: Request, tiers: Iterable[str] = ()) -> None:
        """Where the prompt's KV came from; what a preemption later brings does not change it."""
        if request.prompt_sources is not None:
            return
        left = request.num_prompt_tokens
        by_tier = dict.fromkeys(("device", "host", "disk", "external"), 0)
        per_tier = [("device", request.num_local_hit_tokens)]
        per_tier += [(tier, self.kv_config.hash_block_size) for tier in tiers]
        for tier, num_tokens in per_tier:
            counted = min(num_tokens, left)
            by_tier[tier] += counted
            left -= counted
        request.prompt_sources = PromptSources(prompt_tokens=request.num_prompt_tokens, **by_tier)

    def _start_load(self, draft: Draft, request: Request, hit: PrefixHit, num_external: int) -> bool:
        """Blocks for the external tokens, unhashed until they are filled."""
        allocated = self.manager.allocate(
            request,
            0,
            num_computed_tokens=0,
            hit=hit,
            num_external_tokens=num_external,
            delay_caching=True,
            must_fit=self.config.must_fit,
            is_admission=True,
            others_running=bool(self.running),
        )
        if allocated is None:
            return False
        self.waiting.pop()
        self._record_admission(request, hit)
        request.admitted = True
        request.num_computed_tokens = hit.num_tokens
        request.load_tokens = num_external
        request.status = RequestStatus.LOADING
        request.handle = self._take_handle()
        self.loading[request.handle] = request
        self.counters.loads_started += 1
        draft.loads.extend(self._block_loads(request))
        return True

    def _block_loads(self, request: Request) -> Iterable[BlockLoad]:
        size = self.kv_config.hash_block_size
        first = request.num_computed_tokens // size
        end = (request.num_computed_tokens + request.load_tokens) // size
        assert self.connector.generation is not None
        for group_id, table in enumerate(self.manager.block_ids(request.request_id)):
            indices = [index for index in range(first, end) if table[index] != NULL_BLOCK]
            yield BlockLoad(
                request.handle,
                group_id,
                pack_ids(table[index] for index in indices),
                tuple(request.block_hashes[index] for index in indices),
                self.connector.generation,
            )

    def _make_room(self, draft: Draft, head: Request) -> bool:
        """When nothing runs, blocks can only be held by requests whose load is done: take them back.

        Without this two such requests could wait for each other's blocks for ever.
        """
        if self.running or self._in_flight or draft.scheduled:
            return False
        holders = [request for request in self._waiting_holders() if request is not head]
        if not holders:
            return False
        self._preempt(draft, max(holders, key=self._order))
        return True

    def _schedule(
        self,
        draft: Draft,
        request: Request,
        num_new: int,
        new_blocks: list[list[BlockId]],
        *,
        added: bool = False,
    ) -> None:
        end = request.num_computed_tokens + num_new
        sample = end == len(request.token_ids) + request.num_placeholders
        draft.budget -= num_new
        self.waiting.charge(request.tenant, num_new)
        draft.scheduled[request.sequence] = ScheduledPart(request, num_new, new_blocks, sample, added)

    def _seal(self, draft: Draft, saves: tuple[BlockSave, ...]) -> StepPlan | None:
        copies = tuple((copy.group_id, copy.source, copy.target) for copy in self.manager.take_copies())
        if not (draft.scheduled or draft.loads or saves or self._removed):
            assert not copies
            return None
        self._step_id += 1
        added: list[AddedRequest] = []
        scheduled: list[ScheduledRequest] = []
        for part in draft.scheduled.values():
            scheduled.append(part.message())
            if part.added:
                tables = self.manager.block_ids(part.request.request_id)
                added.append(added_message(part.request, tables, self._eos_token_ids))
            self._advance(part)
        removed, self._removed = tuple(self._removed), []
        self._in_flight.append(InFlightStep(self._step_id, list(draft.scheduled.values())))
        return StepPlan(
            self._step_id,
            removed=removed,
            saves=saves,
            copies=copies,
            added=tuple(added),
            scheduled=tuple(scheduled),
            loads=tuple(draft.loads),
        )

    def _advance(self, part: ScheduledPart) -> None:
        request = part.request
        request.num_computed_tokens += part.num_new_tokens
        request.num_placeholders += part.sample
        part.handle = request.handle
        part.end_token = request.num_computed_tokens

    def _take_handle(self) -> int:
        handle = self._next_handle
        self._next_handle += 1
        return handle

    # -- results ------------------------------------------------------------------------------

    def apply_result(self, result: StepResult, *, now_s: float) -> list[Output]:
        """New tokens and ends. A result that is not the oldest step in flight is dropped, counted."""
        if not self._in_flight or self._in_flight[0].step_id != result.step_id:
            self.counters.stale_results += 1
            return []
        step = self._in_flight.popleft()
        self.counters.saves_dropped += result.num_saves_dropped
        tokens = dict(zip(unpack_ids(result.handles), unpack_ids(result.token_ids), strict=True))
        outputs = []
        for part in step.parts:
            if part.request.finished:
                continue
            token_id = tokens.get(part.handle) if part.sample else None
            output = self._apply_token(part, token_id, now_s) if token_id is not None else None
            self._confirm(part, now_s)
            if output is not None:
                outputs.append(output)
                if output.finish_reason is not None:
                    self._end(part.request, output.finish_reason)
        return outputs

    def _apply_token(self, part: ScheduledPart, token_id: int, now_s: float) -> Output:
        request = part.request
        request.num_placeholders -= 1
        request.append_output(token_id)
        request.first_token_s = request.first_token_s or now_s
        reason, stop_token_id = end_of(request, token_id, self._eos_token_ids, self.config.max_model_len)
        return Output(request, request.num_output_tokens - 1, [token_id], reason, stop_token_id)

    def _confirm(self, part: ScheduledPart, now_s: float) -> None:
        """The step's tokens are computed: full blocks get a hash that waited for its last token, and
        are offered to the store."""
        request = part.request
        if request.handle != part.handle:
            return  # preempted since: its blocks are gone
        if request.pin and part.end_token >= request.num_prompt_tokens:
            self._pin(request, now_s)
        block_size = self.kv_config.hash_block_size
        start_token = part.end_token - part.num_new_tokens
        if part.end_token // block_size == start_token // block_size:
            return
        self.manager.cache_blocks(request, min(part.end_token, request.num_tokens))
        self.connector.offer(request, part.end_token, self.manager.block_ids(request.request_id))

    def end_load(self, reports: Iterable[LoadReport]) -> list[Output]:
        """Reports of one plan's loads. A short load is cut to its last good block before the first
        failure and the rest is computed, or its request ends with an error, which is returned."""
        by_handle: dict[int, list[LoadReport]] = {}
        for report in reports:
            by_handle.setdefault(report.handle, []).append(report)
        outputs = []
        for handle, of_request in by_handle.items():
            request = self.loading.pop(handle, None)
            if request is not None:
                output = self._end_load(request, of_request)
                if output is not None:
                    outputs.append(output)
        return outputs

    def _end_load(self, request: Request, reports: list[LoadReport]) -> Output | None:
        request.handle = 0
        if request.finished:
            self._take_back(request)
            return None
        size = self.kv_config.hash_block_size
        tables = self.manager.block_ids(request.request_id)
        failed = [
            tables[report.group_id].index(BlockId(block_id))
            for report in reports
            for block_id in unpack_ids(report.failed_block_ids)
        ]
        num_local = request.num_computed_tokens
        end = num_local + request.load_tokens
        good = min([end, *(index * size for index in failed)])
        self.counters.load_failures += len(failed)
        if failed and self.config.load_failure_policy is LoadFailurePolicy.FAIL:
            return self._fail_load(request, len(failed), reports)
        request.load_tokens = good - num_local
        if request.num_preemptions == 0:
            self.counters.external_hit_tokens += request.load_tokens
        first = num_local // size
        self._note_sources(request, (request.external_tiers or ())[first : good // size])
        request.external_tiers = ()
        request.num_computed_tokens = good
        request.status = RequestStatus.WAITING
        self.manager.cache_blocks(request, good)
        self.waiting.add(request)
        return None

    def _fail_load(self, request: Request, num_failed: int, reports: list[LoadReport]) -> Output:
        """The blocks were never hashed, so nothing of the failed load can be found."""
        reasons = ", ".join(sorted({report.reason for report in reports if report.reason}))
        request.status = RequestStatus.WAITING
        self._end(request, FinishReason.ERROR)
        return self._error_output(
            request,
            ErrorKind.INTERNAL,
            f"kv_load_failure_policy is fail: {num_failed} external blocks could not be loaded ({reasons})",
        )

    def _error_output(self, request: Request, kind: ErrorKind, problem: str) -> Output:
        return Output(
            request,
            request.num_output_tokens,
            [],
            FinishReason.ERROR,
            error_kind=kind.value,
            error=problem,
        )

    # -- pins -----------------------------------------------------------------------------------

    def _pin(self, request: Request, now_s: float) -> None:
        """Once per request. Past `max_pinned_blocks` it is refused, which the manager counts."""
        request.pin = False
        expires_at = now_s + request.pin_ttl_s if request.pin_ttl_s else None
        self.manager.pin_prefix(request, expires_at=expires_at)

    def pins(self, *, now_s: float) -> list[Pin]:
        self.manager.expire_pins(now_s)
        return self.manager.pins()

    def unpin(self, pin_id: int) -> bool:
        """False if there is no such pin, any more or at all."""
        return self.manager.unpin(pin_id)

    @property
    def num_hash_collisions(self) -> int:
        """Since the start, over all pools; also below."""
        return self._past.collisions + self.manager.num_collisions

    @property
    def num_pins_refused(self) -> int:
        return self._past.pins_refused + self.manager.num_pins_refused

    # -- reset, and the worker's comings and goings ----------------------------------------------

    def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """Drops every block hash. False while any block is held (always the case during a load)."""
        if preempt_running:
            for request in [*self.running.values(), *self._waiting_holders()]:
                self._preempt(None, request)
        return self.manager.reset()

    def lose_worker(self) -> None:
        """Every block is gone. Requests keep their tokens and wait for the next session."""
        self._in_flight.clear()
        for request in self.unfinished():
            request.num_placeholders = 0
        loading, self.loading = list(self.loading.values()), {}
        for request in [*self.running.values(), *loading, *self._waiting_holders()]:
            request.handle = 0
            self.waiting.remove(request)
            if request.finished:
                self._take_back(request)
            else:
                self._requeue(request)
        self._removed.clear()
        self.connector.forget_worker()
        self.manager.reset()

    def open_session(
        self, config: SchedulerConfig, kv_config: KVCacheConfig, eos_token_ids: Iterable[int]
    ) -> list[Output]:
        """A worker has registered, perhaps with another capacity. Returns the requests that no longer
        fit, ended with an error."""
        self.lose_worker()
        waiting = self.unfinished()
        self._lost_events += self.manager.take_events()
        generation = self.connector.generation
        for request in waiting:
            self.waiting.remove(request)
        self._past = _ManagerSums(self.num_hash_collisions, self.num_pins_refused)
        self._configure(config, kv_config, eos_token_ids)
        self.connector.generation = generation
        outputs = []
        for request in sorted(waiting, key=lambda request: request.sequence):
            try:
                self._check_length(request)
            except InvalidInput as error:
                self._end(request, FinishReason.ERROR)
                outputs.append(self._error_output(request, error.kind, str(error)))
            else:
                self._enqueue(request)
        return outputs

    def take_events(self) -> list[KvEvent]:
        events = self._lost_events + self.manager.take_events()
        self._lost_events = []
        return events
