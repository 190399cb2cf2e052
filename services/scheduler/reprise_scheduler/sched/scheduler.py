"""Plan steps and apply their results. Pure: time comes in as an argument, plans go out as values.

One plan covers first the running requests (one token each, or the next chunk of a prompt) and then
waiting ones, while there is budget and blocks. When blocks run short a running request is
preempted: the one that is served last. With `async_scheduling` a plan may be made before the result
of the one before is known; a token to come is a placeholder, and a block that it fills gets its hash
when the token is known. Plans are executed in order, so a block that is taken back from a step in
flight can be handed out again at once.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from reprise_core.errors import Exhausted, InvalidInput
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
    WorkerSampling,
    pack_ids,
    unpack_ids,
)
from reprise_scheduler.kv_cache.config import KVCacheConfig
from reprise_scheduler.kv_cache.manager import KVCacheManager
from reprise_scheduler.kv_cache.request import PrefixHit
from reprise_scheduler.sched.config import SchedulerConfig
from reprise_scheduler.sched.connector import NULL_BLOCK, Connector
from reprise_scheduler.sched.outputs import Counters, Output
from reprise_scheduler.sched.queues import WaitingQueue
from reprise_scheduler.sched.request import Request, RequestStatus


@dataclass(slots=True)
class _Scheduled:
    """One request's part of a plan."""

    request: Request
    num_new_tokens: int
    new_block_ids: list[list[BlockId]]
    sample: bool
    added: bool = False
    """The worker is given the whole state, for it does not have the request."""
    handle: int = 0
    end_token: int = 0
    """Computed tokens once the step is done."""


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    budget: int
    scheduled: dict[int, _Scheduled] = field(default_factory=dict)
    """By the request's sequence."""
    loads: list[BlockLoad] = field(default_factory=list)
    preempted: bool = False


@dataclass(slots=True)
class _InFlight:
    step_id: int
    parts: list[_Scheduled]


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        kv_config: KVCacheConfig,
        *,
        enable_events: bool = True,
        enable_connector: bool = False,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.counters = Counters()
        self.waiting = WaitingQueue(config.policy)
        self.running: dict[int, Request] = {}
        """By sequence, in the order of admission."""
        self.loading: dict[int, Request] = {}
        """By handle. A finished request stays until its load ends, for its blocks are written to."""
        self._enable_events = enable_events
        self._enable_connector = enable_connector
        self._next_handle = 1
        self._lost_events: list[KvEvent] = []
        self._configure(config, kv_config, eos_token_ids)

    def _configure(
        self, config: SchedulerConfig, kv_config: KVCacheConfig, eos_token_ids: Iterable[int]
    ) -> None:
        pool_tokens = (kv_config.num_blocks - 1) * min(group.block_size for group in kv_config.groups)
        # A request that has the pool to itself can always go on: the pool bounds the context.
        max_model_len = min(config.max_model_len, pool_tokens)
        self.config = replace(config, max_model_len=max_model_len)
        self.kv_config = replace(kv_config, max_model_len=max_model_len)
        self.manager = KVCacheManager(self.kv_config, enable_events=self._enable_events)
        self.connector = Connector(
            config,
            enabled=self._enable_connector,
            block_size=kv_config.hash_block_size,
            num_groups=len(kv_config.groups),
            counters=self.counters,
        )
        self._eos_token_ids = frozenset(eos_token_ids)
        self._step_id = 0
        self._in_flight: deque[_InFlight] = deque()
        self._removed: list[int] = []

    # -- requests in and out ------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Raises InvalidInput for what can never run, Exhausted when too many wait."""
        self._check_length(request)
        if self.num_waiting >= self.config.max_num_waiting:
            raise Exhausted(f"{self.num_waiting} requests wait, at most {self.config.max_num_waiting} may")
        self._enqueue(request)

    def _check_length(self, request: Request) -> None:
        limit = self.config.max_model_len
        if request.num_tokens >= limit:
            raise InvalidInput(
                "prompt",
                f"{request.num_tokens} tokens leave no room for an answer: prompt and answer together"
                f" may have {limit} tokens",
            )

    def _enqueue(self, request: Request) -> None:
        if not self.connector.ask(request):
            self.waiting.add(request)

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
        if len(self._in_flight) >= self.config.max_in_flight_steps:
            return None
        # Taken before this plan hands out any block: one that still has its hash now was filled by an
        # earlier plan. Later it might be a block that this plan is to fill with the same tokens.
        saves = self.connector.take_saves(self.config.max_saves_per_step, self.manager.block_hash_of)
        draft = _Draft(budget=self.config.max_num_batched_tokens)
        self._plan_running(draft)
        if not draft.preempted:
            self._plan_waiting(draft, now_s)
        return self._seal(draft, saves)

    def _plan_running(self, draft: _Draft) -> None:
        for request in list(self.running.values()):
            if draft.budget <= 0:
                return
            if request.sequence not in self.running:
                continue  # preempted for one that is served earlier
            num_new = self._num_new_tokens(request, draft.budget)
            if num_new > 0:
                self._schedule_running(draft, request, num_new)

    def _schedule_running(self, draft: _Draft, request: Request, num_new: int) -> None:
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
        threshold = self.config.long_prefill_token_threshold
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

    def _preempt(self, draft: _Draft | None, victim: Request) -> None:
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

    def _plan_waiting(self, draft: _Draft, now_s: float) -> None:
        while draft.budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            # A preempted request is resumed only when the tokens of steps in flight are back.
            if request is None or request.num_placeholders:
                return
            if not self._plan_head(draft, request, now_s) and not self._make_room(draft, request):
                return

    def _plan_head(self, draft: _Draft, request: Request, now_s: float) -> bool:
        """Whether the first waiting request could be admitted, or its load started."""
        if request.admitted:  # its load is done
            return self._admit(draft, request, None, now_s)
        hit = self.manager.lookup(request)
        num_external = self.connector.external_tokens(request, hit.num_tokens)
        if not num_external:
            return self._admit(draft, request, hit, now_s)
        if len(self.loading) >= self.config.max_concurrent_loads:
            return False
        return self._start_load(draft, request, hit, num_external)

    def _admit(self, draft: _Draft, request: Request, hit: PrefixHit | None, now_s: float) -> bool:
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
        request.first_scheduled_s = request.first_scheduled_s or now_s
        request.handle = self._take_handle()
        self.running[request.sequence] = request
        self._schedule(draft, request, num_new, new_blocks, added=True)
        return True

    def _record_admission(self, request: Request, hit: PrefixHit) -> None:
        """Metrics count tokens, at admission; the manager counts preempted requests apart."""
        request.num_local_hit_tokens = hit.num_tokens
        request.load_tokens = 0
        self.manager.record_admission(request, hit.num_tokens)
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

    def _start_load(self, draft: _Draft, request: Request, hit: PrefixHit, num_external: int) -> bool:
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

    def _make_room(self, draft: _Draft, head: Request) -> bool:
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
        draft: _Draft,
        request: Request,
        num_new: int,
        new_blocks: list[list[BlockId]],
        *,
        added: bool = False,
    ) -> None:
        end = request.num_computed_tokens + num_new
        sample = end == len(request.token_ids) + request.num_placeholders
        draft.budget -= num_new
        draft.scheduled[request.sequence] = _Scheduled(request, num_new, new_blocks, sample, added)

    def _seal(self, draft: _Draft, saves: tuple[BlockSave, ...]) -> StepPlan | None:
        if not (draft.scheduled or draft.loads or saves or self._removed):
            return None
        self._step_id += 1
        added: list[AddedRequest] = []
        scheduled: list[ScheduledRequest] = []
        for part in draft.scheduled.values():
            scheduled.append(self._scheduled_message(part))
            if part.added:
                added.append(self._added_message(part.request))
            self._advance(part)
        removed, self._removed = tuple(self._removed), []
        self._in_flight.append(_InFlight(self._step_id, list(draft.scheduled.values())))
        return StepPlan(
            self._step_id,
            removed=removed,
            saves=saves,
            added=tuple(added),
            scheduled=tuple(scheduled),
            loads=tuple(draft.loads),
        )

    def _advance(self, part: _Scheduled) -> None:
        request = part.request
        request.num_computed_tokens += part.num_new_tokens
        request.num_placeholders += part.sample
        part.handle = request.handle
        part.end_token = request.num_computed_tokens

    def _scheduled_message(self, part: _Scheduled) -> ScheduledRequest:
        new_blocks = () if part.added else tuple(pack_ids(ids) for ids in part.new_block_ids)
        request = part.request
        return ScheduledRequest(
            request.handle, request.num_computed_tokens, part.num_new_tokens, new_blocks, part.sample
        )

    def _added_message(self, request: Request) -> AddedRequest:
        sampling = request.sampling
        banned = (*self._eos_token_ids, *sampling.stop_token_ids) if sampling.min_tokens else ()
        return AddedRequest(
            request.handle,
            pack_ids(request.token_ids),
            request.num_prompt_tokens,
            request.num_computed_tokens,
            tuple(pack_ids(table) for table in self.manager.block_ids(request.request_id)),
            WorkerSampling(
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
                sampling.seed,
                sampling.min_tokens,
                pack_ids(banned),
            ),
        )

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
            self._confirm(part)
            if output is not None:
                outputs.append(output)
                if output.finish_reason is not None:
                    self._end(part.request, output.finish_reason)
        return outputs

    def _apply_token(self, part: _Scheduled, token_id: int, now_s: float) -> Output:
        request = part.request
        request.num_placeholders -= 1
        request.append_output(token_id)
        request.first_token_s = request.first_token_s or now_s
        output = Output(request, request.num_output_tokens - 1, [token_id])
        self._check_stop(request, token_id, output)
        return output

    def _check_stop(self, request: Request, token_id: int, output: Output) -> None:
        sampling = request.sampling
        num_output = request.num_output_tokens
        if num_output >= sampling.min_tokens:
            is_eos = token_id in self._eos_token_ids and not sampling.ignore_eos
            if is_eos or token_id in sampling.stop_token_ids:
                output.finish_reason = FinishReason.STOP
                output.stop_token_id = token_id
                return
        if num_output >= sampling.max_tokens or request.num_tokens >= self.config.max_model_len:
            output.finish_reason = FinishReason.LENGTH

    def _confirm(self, part: _Scheduled) -> None:
        """The step's tokens are computed: full blocks get a hash that waited for its last token, and
        are offered to the store."""
        request = part.request
        if request.handle != part.handle:
            return  # preempted since: its blocks are gone
        block_size = self.kv_config.hash_block_size
        start_token = part.end_token - part.num_new_tokens
        if part.end_token // block_size == start_token // block_size:
            return
        self.manager.cache_blocks(request, min(part.end_token, request.num_tokens))
        self.connector.offer(request, part.end_token, self.manager.block_ids(request.request_id))

    def end_load(self, reports: Iterable[LoadReport]) -> None:
        """Reports of one plan's loads. A short load is cut to its last good block before the first
        failure; the rest is computed."""
        by_handle: dict[int, list[LoadReport]] = {}
        for report in reports:
            by_handle.setdefault(report.handle, []).append(report)
        for handle, of_request in by_handle.items():
            request = self.loading.pop(handle, None)
            if request is not None:
                self._end_load(request, of_request)

    def _end_load(self, request: Request, reports: list[LoadReport]) -> None:
        request.handle = 0
        if request.finished:
            self._take_back(request)
            return
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
        self._configure(config, kv_config, eos_token_ids)
        self.connector.generation = generation
        outputs = []
        for request in sorted(waiting, key=lambda request: request.sequence):
            try:
                self._check_length(request)
            except InvalidInput as error:
                self._end(request, FinishReason.ERROR)
                outputs.append(
                    Output(
                        request,
                        request.num_output_tokens,
                        [],
                        FinishReason.ERROR,
                        error_kind="invalid",
                        error=str(error),
                    )
                )
            else:
                self._enqueue(request)
        return outputs

    def take_events(self) -> list[KvEvent]:
        events = self._lost_events + self.manager.take_events()
        self._lost_events = []
        return events
