"""Drives the pure scheduler with the simulated worker, step by step, without a clock."""

from typing import Any

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
        self, *, num_blocks: int = 64, block_size: int = 4, connector: bool = False, **config: Any
    ) -> None:
        config.setdefault("async_scheduling", False)
        caching = config.pop("enable_caching", True)
        watermark = config.pop("watermark", 0.0)
        options = {name: config.pop(name) for name in KV_OPTIONS if name in config}
        make_policy = config.pop("make_policy", None)
        self.store = SimStore()
        self.worker = SimWorker(num_blocks, block_size, self.store)
        self.hasher = BlockHasher(
            algorithm=HashAlgorithm.SHA256_CBOR, block_size=block_size, none_hash=HASHER_ROOT
        )
        self.scheduler = Scheduler(
            SchedulerConfig(**config),
            KVCacheConfig(
                num_blocks=num_blocks,
                groups=(GroupSpec(block_size=block_size),),
                enable_caching=caching,
                watermark=watermark,
                **options,
            ),
            enable_connector=connector,
            make_policy=make_policy,
        )
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.plans: list[StepPlan] = []
        self._sequence = 0

    def add(self, name: str, prompt: list[int], max_tokens: int = 4, **more: Any) -> Request:
        self._sequence += 1
        chain = self.hasher.chain()
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
        return self.scheduler.plan_step(now_s=0.0)

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
        for output in self.scheduler.apply_result(self.worker.execute(plan), now_s=0.0):
            self.outputs[output.request.owner] += output.token_ids
            if output.finish_reason is not None:
                self.finished[output.request.owner] = output.finish_reason.value
        reports = [self.worker.end_load(load, lambda: False) for load in list(self.worker.loads)]
        for output in self.scheduler.end_load(reports):
            assert output.finish_reason is not None
            self.finished[output.request.owner] = output.error

    def answer_lookups(self) -> None:
        for request, attempt in self.scheduler.connector.take_lookups(0.0):
            tiers = []
            for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.worker.block_size]:
                if block_hash not in self.store.blocks:
                    break
                tiers.append("external")
            self.scheduler.answer_lookup(request, attempt, tiers, self.store.generation)

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
