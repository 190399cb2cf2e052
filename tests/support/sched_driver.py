"""Drives the pure scheduler with the simulated worker, step by step, without a clock."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from reprise_core.extra_keys import HashInputs
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.hash_chain import BlockHasher
from reprise_core.ids import RequestId
from reprise_core.none_hash import none_hash
from reprise_core.requests import SamplingParams
from reprise_core.steps import StepPlan
from reprise_scheduler.kv_cache.config import GroupSpec, KVCacheConfig
from reprise_scheduler.sched.config import SchedulerConfig
from reprise_scheduler.sched.request import Request
from reprise_scheduler.sched.scheduler import Scheduler
from support.sim_worker import SimStore, SimWorker

KV_OPTIONS = ("full_prompt_hit", "verify_tokens", "track_misses", "max_pinned_blocks")
HASHER_ROOT = none_hash(HashAlgorithm.SHA256_CBOR, "test")


class Driver:
    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        groups: Sequence[GroupSpec] = (),
        connector: bool = False,
        **config: Any,
    ) -> None:
        """`groups` empty = one of full attention."""
        groups = groups or (GroupSpec(block_size=block_size),)
        config.setdefault("async_scheduling", False)
        caching = config.pop("enable_caching", True)
        watermark = config.pop("watermark", 0.0)
        options = {name: config.pop(name) for name in KV_OPTIONS if name in config}
        make_policy = config.pop("make_policy", None)
        self.store = SimStore()
        self.worker = SimWorker(num_blocks, block_size, self.store, groups)
        self.hasher = BlockHasher(
            algorithm=HashAlgorithm.SHA256_CBOR, block_size=block_size, none_hash=HASHER_ROOT
        )
        self.scheduler = Scheduler(
            SchedulerConfig(**config),
            KVCacheConfig(
                num_blocks=num_blocks,
                groups=groups,
                enable_caching=caching,
                watermark=watermark,
                **options,
            ),
            enable_connector=connector,
            make_policy=make_policy,
        )
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.logprobs: dict[str, bytes] = {}
        self.prompt_logprobs: dict[str, list[bytes]] = {}
        """Each time that they were handed out."""
        self.plans: list[StepPlan] = []
        self.now_s = 0.0
        self.step_s = 0.0
        """What the worker says that a step took."""
        self.hold_loads = False
        """Loads end only in `end_loads`."""
        self.fail_load: Callable[[], bool] = lambda: False
        """Asked per block."""
        self._sequence = 0

    def add(self, name: str, prompt: list[int], max_tokens: int = 4, **more: Any) -> Request:
        self._sequence += 1
        chain = self.hasher.chain(HashInputs(lora=more.get("lora")))
        chain.append(prompt)
        sampling = more.pop("sampling", SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        request = Request(
            request_id=RequestId(name),
            owner=name,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            chain=chain,
            arrival_s=more.pop("arrival_s", 0.0),
            sequence=self._sequence,
            **more,
        )
        self.outputs[name] = []
        self.scheduler.add(request)
        return request

    def plan(self) -> StepPlan | None:
        return self.scheduler.plan_step(now_s=self.now_s)

    def step(self) -> StepPlan | None:
        """Plan and execute one step; look-ups and loads are answered at once."""
        plan = self.plan()
        self.answer_lookups()
        if plan is None:
            plan = self.plan()
        if plan is not None:
            self.execute(plan)
        return plan

    def execute(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        result = msgspec.structs.replace(self.worker.execute(plan), model_time_s=self.step_s)
        for output in self.scheduler.apply_result(result, now_s=self.now_s):
            name = output.request.owner
            self.outputs[name] += output.token_ids
            self.logprobs[name] = self.logprobs.get(name, b"") + output.logprobs
            if output.prompt_logprobs:
                self.prompt_logprobs.setdefault(name, []).append(output.prompt_logprobs)
            if output.finish_reason is not None:
                self.finished[output.request.owner] = output.finish_reason.value
        if not self.worker.hold_saves:
            self.scheduler.connector.saves_ended(len(plan.saves))
        if not self.hold_loads:
            self.end_loads()

    def end_saves(self, count: int | None = None) -> None:
        self.scheduler.connector.saves_ended(self.worker.end_saves(count))

    def end_loads(self) -> None:
        reports = [self.worker.end_load(load, self.fail_load) for load in list(self.worker.loads)]
        for output in self.scheduler.end_load(reports, now_s=self.now_s):
            assert output.finish_reason is not None
            self.finished[output.request.owner] = output.error

    def answer_lookups(self) -> None:
        for request, attempt in self.scheduler.connector.take_lookups(self.now_s):
            hashes = request.block_hashes[: (request.num_tokens - 1) // self.worker.block_size]
            stored = self.store.stored(self.scheduler.manager.groups, hashes)
            self.scheduler.answer_lookup(request, attempt, stored, self.store.generation)

    def run(self, max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if not self.scheduler.unfinished() and self.plan_is_idle():
                return
            self.step()
        raise AssertionError("no end")

    def plan_is_idle(self) -> bool:
        plan = self.plan()
        if plan is not None:
            self.execute(plan)
        return plan is None
