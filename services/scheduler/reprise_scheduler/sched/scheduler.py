"""Plan steps and apply their results. Pure: time comes in as an argument, plans go out as values.

One plan covers first the running requests (one token each, or the next chunk of a prompt) and then
waiting ones, while there is budget and blocks. When blocks run short a running request is
preempted: the one that is served last. With `async_scheduling` a plan may be made before the result
of the one before is known; a token to come is a placeholder, and a block that it fills gets its hash
when the token is known. Plans are executed in order, so a block that is taken back from a step in
flight can be handed out again at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reprise_core.errors import RepriseError
from reprise_core.extra_keys import LoraAdapter
from reprise_core.kv_events import KvEvent
from reprise_core.requests import FinishReason
from reprise_core.steps import LoadReport, StepPlan, StepResult
from reprise_scheduler.kv_cache.config import KVCacheConfig
from reprise_scheduler.kv_cache.pins import Pin
from reprise_scheduler.sched.admissions import Admissions
from reprise_scheduler.sched.backpressure import QueueFull, QueueLimit
from reprise_scheduler.sched.config import SchedulerConfig
from reprise_scheduler.sched.draft import Draft
from reprise_scheduler.sched.loads import Loads
from reprise_scheduler.sched.outputs import Output, error_output
from reprise_scheduler.sched.planner import Planner
from reprise_scheduler.sched.request import Request
from reprise_scheduler.sched.served_adapters import still_served
from reprise_scheduler.sched.state import EngineState, PolicyMaker
from reprise_scheduler.sched.steps import Steps
from reprise_scheduler.sched.stored_blocks import StoredBlocks


@dataclass(frozen=True, slots=True)
class _ManagerSums:
    """What the managers of earlier sessions counted."""

    collisions: int = 0
    pins_refused: int = 0


class Scheduler(EngineState):
    """What the engine asks of it; the parts are `Planner`, `Loads` and `Steps`."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_config: KVCacheConfig,
        *,
        enable_events: bool = True,
        integer_hashes: bool = True,
        enable_connector: bool = False,
        eos_token_ids: Iterable[int] = (),
        make_policy: PolicyMaker | None = None,
    ) -> None:
        """`make_policy` is called with the number of blocks for each pool; None = least recently used."""
        super().__init__(
            config,
            kv_config,
            enable_events=enable_events,
            integer_hashes=integer_hashes,
            enable_connector=enable_connector,
            eos_token_ids=eos_token_ids,
            make_policy=make_policy,
        )
        self._past = _ManagerSums()
        self._lost_events: list[KvEvent] = []
        admissions = Admissions(self)
        self._steps = Steps(self)
        self._loads = Loads(self, admissions)
        self._planner = Planner(self, admissions, self._loads, in_flight=lambda: self._steps.num_in_flight)

    # -- requests in and out ------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Raises InvalidInput for what can never run, QueueFull when too many wait."""
        self.check_length(request)
        self._check_room(request)
        best = self.config.tenant_max_priority.get(request.tenant)
        if best is not None and request.priority < best:
            request.priority = best
            self.counters.priority_cuts += 1
        if not self.num_waiting:
            self.drain_rate.backlog_began(request.arrival_s)
        self.enqueue(request)

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

    def finish(self, request: Request, reason: FinishReason, *, num_output_tokens: int | None = None) -> None:
        """End a request from outside: aborted, or its caller has what it needs. Idempotent.

        A plan already sent is executed as sent; the request is left out from the next on.
        """
        if request.finished:
            return
        if num_output_tokens is not None:
            del request.token_ids[request.num_prompt_tokens + max(num_output_tokens, 0) :]
        self.end(request, reason)

    @property
    def num_in_flight(self) -> int:
        return self._steps.num_in_flight

    def answer_lookup(
        self, request: Request, attempt: int, stored: StoredBlocks, generation: int | None
    ) -> None:
        """The store's answer to one of `connector.take_lookups`."""
        if self.connector.answer(request, attempt, stored, generation):
            self.waiting.add(request)

    # -- steps ----------------------------------------------------------------------------------

    def plan_step(self, *, now_s: float) -> StepPlan | None:
        """The next plan, or None when there is nothing to do or as many are in flight as may be."""
        for request in self.connector.expire(now_s):
            self.waiting.add(request)
        self.manager.expire_pins(now_s)
        if self._steps.num_in_flight >= self.config.max_in_flight_steps:
            return None
        # Taken before this plan hands out any block: one that still has its hash now was filled by an
        # earlier plan. Later it might be a block that this plan is to fill with the same tokens.
        saves = self.connector.take_saves(self.config.max_saves_per_step, self.manager.holds)
        draft = Draft(budget=self.config.max_num_batched_tokens)
        self._planner.fill(draft, now_s)
        return self._steps.seal(draft, saves)

    def apply_result(self, result: StepResult, *, now_s: float) -> list[Output]:
        """New tokens and ends. A result that is not the oldest step in flight is dropped, counted."""
        return self._steps.apply(result, now_s=now_s)

    def end_load(self, reports: Iterable[LoadReport], *, now_s: float) -> list[Output]:
        """Reports of loads; the requests that end with an error by what they say."""
        return self._loads.end(reports, now_s=now_s)

    # -- pins -----------------------------------------------------------------------------------

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
            for request in [*self.running.values(), *self.waiting_holders()]:
                self._planner.preempt(None, request)
        done = self.manager.reset()
        if done:
            self.connector.device_was_reset()
        return done

    def lose_worker(self) -> None:
        """Every block is gone. Requests keep their tokens and wait for the next session."""
        self._steps.forget()
        for request in self.unfinished():
            request.num_placeholders = 0
        loading, self.loading = list(self.loading.values()), {}
        for request in [*self.running.values(), *loading, *self.waiting_holders()]:
            request.handle = 0
            self.waiting.remove(request)
            if request.finished:
                self.take_back(request)
            else:
                self.requeue(request)
        self.removed.clear()
        self.connector.forget_worker()
        self.manager.reset()

    def open_session(
        self,
        config: SchedulerConfig,
        kv_config: KVCacheConfig,
        eos_token_ids: Iterable[int],
        adapters: Sequence[LoraAdapter] = (),
    ) -> list[Output]:
        """A worker has registered, perhaps with another capacity, or other content of its adapters. Returns
        the requests that no longer fit, or whose adapter it does not serve, ended with an error."""
        self.lose_worker()
        waiting = self.unfinished()
        self._lost_events += self.manager.take_events()
        generation = self.connector.generation
        for request in waiting:
            self.waiting.remove(request)
        self._past = _ManagerSums(self.num_hash_collisions, self.num_pins_refused)
        self.configure(config, kv_config, eos_token_ids)
        self.connector.generation = generation
        outputs = []
        for request in sorted(waiting, key=lambda request: request.sequence):
            try:
                self.check_length(request)
                if request.lora is not None:
                    request.lora = still_served(request.lora, adapters)
            except RepriseError as error:
                self.end(request, FinishReason.ERROR)
                outputs.append(error_output(request, error.kind, str(error)))
            else:
                self.enqueue(request)
        return outputs

    def take_events(self) -> list[KvEvent]:
        events = self._lost_events + self.manager.take_events()
        self._lost_events = []
        return events
