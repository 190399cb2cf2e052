"""Choosing what a plan computes: running requests first, then waiting ones, while budget and blocks last."""

from collections.abc import Callable, Iterable

from reprise_core.ids import BlockId
from reprise_scheduler.kv_cache.request import PrefixHit
from reprise_scheduler.sched.admissions import Admissions
from reprise_scheduler.sched.draft import Draft, ScheduledPart
from reprise_scheduler.sched.loads import Loads
from reprise_scheduler.sched.request import Request, RequestStatus
from reprise_scheduler.sched.state import EngineState


class Planner:
    """When blocks run short a running request is preempted: the one that is served last."""

    def __init__(
        self, state: EngineState, admissions: Admissions, loads: Loads, *, in_flight: Callable[[], int]
    ) -> None:
        """`in_flight` answers how many steps are on their way."""
        self._state = state
        self._admissions = admissions
        self._loads = loads
        self._num_in_flight = in_flight

    def fill(self, draft: Draft, now_s: float) -> None:
        self._plan_running(draft)
        if not draft.preempted:
            self._plan_waiting(draft, now_s)

    def preempt(self, draft: Draft | None, victim: Request) -> None:
        state = self._state
        state.counters.preemptions += 1
        if draft is not None:
            draft.preempted = True
            undone = draft.scheduled.pop(victim.sequence, None)
            if undone is not None:
                draft.budget += undone.num_new_tokens
                self._unhash_uncomputed(victim)
        state.waiting.remove(victim)
        state.requeue(victim)

    def _plan_running(self, draft: Draft) -> None:
        for request in list(self._state.running.values()):
            if draft.budget <= 0:
                return
            if request.sequence not in self._state.running:
                continue  # preempted for one that is served earlier
            budget = draft.budget if request.logprobs is None else self._budget(draft, request)
            num_new = self._num_new_tokens(request, budget)
            if num_new > 0:
                self._schedule_running(draft, request, num_new)

    def _schedule_running(self, draft: Draft, request: Request, num_new: int) -> None:
        while True:
            new_blocks = self._state.manager.allocate(
                request, num_new, num_computed_tokens=request.num_computed_tokens
            )
            if new_blocks is not None:
                self._schedule(draft, request, num_new, new_blocks)
                return
            victim = self._victim()
            self.preempt(draft, victim)
            if victim is request:
                return

    def _num_new_tokens(self, request: Request, budget: int) -> int:
        num_new = len(request.token_ids) + request.num_placeholders - request.num_computed_tokens
        if request.num_placeholders and self._ends_with_placeholders(request):
            return 0
        return self._cap(num_new, budget)

    def _budget(self, draft: Draft, request: Request) -> int:
        """Tokens that the plan has left for this request."""
        if request.skip_lookup and self._state.config.enable_chunked_prefill:
            return min(draft.budget, draft.prompt_positions)
        return draft.budget

    def _cap(self, num_new: int, budget: int) -> int:
        config = self._state.config
        threshold = config.long_prefill_token_threshold if config.enable_chunked_prefill else 0
        return min(num_new, budget, threshold) if threshold > 0 else min(num_new, budget)

    def _ends_with_placeholders(self, request: Request) -> bool:
        """Whether the tokens in flight are the last ones: nothing is to be computed after them."""
        to_come = request.num_output_tokens + request.num_placeholders
        num_tokens = len(request.token_ids) + request.num_placeholders
        return to_come >= request.sampling.max_tokens or num_tokens >= self._state.config.max_model_len

    def _victim(self) -> Request:
        """Of those that hold blocks, the one that is served last: the lowest priority, then the latest.

        A request whose load is done holds blocks while it waits. The first in order is never chosen
        while another holds any, so it gets on.
        """
        state = self._state
        return max((*state.running.values(), *state.waiting_holders()), key=state.order)

    def _unhash_uncomputed(self, request: Request) -> None:
        """Blocks that the withdrawn part of the plan would have filled must not be found as cached."""
        state = self._state
        first = request.num_computed_tokens // state.kv_config.hash_block_size
        for table in state.manager.block_ids(request.request_id):
            state.manager.evict(table[first:])

    def _plan_waiting(self, draft: Draft, now_s: float) -> None:
        state = self._state
        while draft.budget > 0 and len(state.running) < state.config.max_num_seqs:
            request = state.waiting.peek()
            # A preempted request is resumed only when the tokens of steps in flight are back.
            if request is None or request.num_placeholders:
                return
            if not self._plan_head(draft, request, now_s) and not self._make_room(draft, request):
                return

    def _plan_head(self, draft: Draft, request: Request, now_s: float) -> bool:
        """Whether the first waiting request could be admitted, or its load started."""
        state = self._state
        if request.admitted:  # its load is done
            return self._admit(draft, request, None, now_s)
        hit = state.manager.lookup(request)
        if hit.copy_sources and not self._filled_before(draft, hit.copy_sources):
            hit = state.manager.lookup(request, allow_copy=False)
        if state.kv_config.track_misses:
            request.miss = state.manager.explain_miss(request, hit)
        state.connector.ask_again(request)
        num_external = self._loads.external_tokens(request, hit, now_s)
        if not num_external:
            return self._admit(draft, request, hit, now_s)
        if self._loads.defer(request, hit, num_external):
            return True
        return self._loads.start(draft, request, hit, num_external, now_s)

    def _filled_before(self, draft: Draft, block_ids: Iterable[BlockId]) -> bool:
        """Whether earlier plans fill these blocks: copies are made before this plan computes anything."""
        filling: set[BlockId] = set()
        for part in draft.scheduled.values():
            request = part.request
            tables = self._state.manager.block_ids(request.request_id)
            for group, table in zip(self._state.kv_config.groups, tables, strict=True):
                filling.update(table[request.num_computed_tokens // group.block_size :])
        return filling.isdisjoint(block_ids)

    def _admit(self, draft: Draft, request: Request, hit: PrefixHit | None, now_s: float) -> bool:
        state = self._state
        num_local = hit.num_tokens if hit is not None else 0
        num_computed = request.num_computed_tokens + num_local
        wanted = request.num_tokens - num_computed
        num_new = self._cap(wanted, self._budget(draft, request))
        if num_new <= 0 or (not state.config.enable_chunked_prefill and num_new < wanted):
            return False
        new_blocks = state.manager.allocate(
            request,
            num_new,
            num_computed_tokens=request.num_computed_tokens,
            hit=hit,
            must_fit=state.config.must_fit,
            is_admission=True,
            others_running=bool(state.running),
        )
        if new_blocks is None:
            return False
        state.waiting.pop()
        if hit is not None:
            self._admissions.record(request, hit)
            self._admissions.note_sources(request)
        request.admitted = True
        request.num_computed_tokens = num_computed
        request.status = RequestStatus.RUNNING
        state.let_go(request)
        state.count_waiting(request, 0)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
            state.drain_rate.left(now_s)
        request.handle = state.take_handle()
        state.running[request.sequence] = request
        self._schedule(draft, request, num_new, new_blocks, added=True)
        return True

    def _make_room(self, draft: Draft, head: Request) -> bool:
        """When nothing runs, blocks can only be held by requests whose load is done: take them back.

        Without this two such requests could wait for each other's blocks for ever.
        """
        state = self._state
        if state.running or self._num_in_flight() or draft.scheduled:
            return False
        holders = [request for request in state.waiting_holders() if request is not head]
        if not holders:
            return False
        self.preempt(draft, max(holders, key=state.order))
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
        if request.logprobs is not None and request.skip_lookup:
            draft.prompt_positions -= num_new
        self._state.waiting.charge(request.tenant, num_new)
        draft.scheduled[request.sequence] = ScheduledPart(request, num_new, new_blocks, sample, added)
