"""The scheduler against a simulated worker in virtual time: random arrivals, cancels, short pools,
slow and failing loads, resets, lost workers. Invariants after each step; every output is right."""

import os
import random
from collections import deque

import msgspec
import pytest

from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.hash_chain import BlockHasher
from reprise_core.ids import RequestId
from reprise_core.none_hash import none_hash
from reprise_core.requests import FinishReason, SamplingParams
from reprise_scheduler.kv_cache.config import GroupKind, GroupSpec, KVCacheConfig
from reprise_scheduler.kv_cache.eviction import EvictionPolicy, LeastRecentlyUsed
from reprise_scheduler.kv_cache.tenant_shares import TenantShares
from reprise_scheduler.sched.backpressure import MAX_RETRY_S, MIN_RETRY_S, QueueFull, QueueLimit
from reprise_scheduler.sched.config import KvRole, LoadFailurePolicy, SchedulerConfig, SchedulingPolicy
from reprise_scheduler.sched.load_cost import LoadRule
from reprise_scheduler.sched.outputs import Output
from reprise_scheduler.sched.request import Request, RequestStatus
from reprise_scheduler.sched.scheduler import Scheduler
from reprise_scheduler.sched.stored_blocks import NOTHING_STORED
from support.sim_worker import VOCAB, SimStore, SimWorker, expected_logprobs, expected_output

SEEDS = int(os.environ.get("REPRISE_SIM_SEEDS", "40"))
ROOT = none_hash(HashAlgorithm.XXHASH_CBOR, "7")


def some_groups(rng: random.Random, block_size: int) -> list[GroupSpec]:
    """Mostly hybrids: a full group, and others in any number and order; or windowed ones alone."""

    def windowed() -> GroupSpec:
        if rng.random() < 0.2:
            # The reference's chunked hits presume whole blocks.
            chunk = block_size * rng.choice([1, 2, 5])
            return GroupSpec(kind=GroupKind.CHUNKED, block_size=block_size, chunk=chunk)
        window = rng.choice([2, 3, 8, 9, 21, 50])
        return GroupSpec(kind=GroupKind.SLIDING, block_size=block_size, window=window)

    groups = [windowed() for _ in range(rng.choice([1, 1, 2]))]
    groups += [groups[0]] * rng.choice([0, 0, 1])
    groups += [GroupSpec(block_size=block_size)] * rng.choice([0, 1, 1, 1, 2])
    rng.shuffle(groups)
    return groups[:4]  # the smallest pool has room for no more


class Simulation:
    def __init__(self, seed: int, *, hybrid: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice([1, 2, 4, 8])
        self.groups = [GroupSpec(block_size=self.block_size)]
        if hybrid:
            self.groups = some_groups(random.Random(seed), self.block_size)
        self.config = SchedulerConfig(
            max_num_seqs=rng.choice([1, 3, 8, 32]),
            max_num_batched_tokens=rng.choice([4, 16, 64, 256]),
            max_model_len=rng.choice([40, 80, 160]),
            max_num_waiting=1000,
            long_prefill_token_threshold=rng.choice([0, 0, 3]),
            policy=rng.choice(list(SchedulingPolicy)),
            must_fit=rng.random() < 0.3,
            async_scheduling=rng.random() < 0.6,
            max_external_wait_s=5.0,
            max_concurrent_loads=rng.choice([1, 4]),
            max_loading_share=rng.choice([0.0, 0.3, 1.0]),
            load_rule=rng.choice(list(LoadRule)),
            max_saves_per_step=rng.choice([1, 8]),
            max_pending_saves=rng.choice([2, 100]),
            enable_chunked_prefill=rng.random() < 0.8,
            tenant_weights=rng.choice([{}, {"a": 4.0}]),
            tenant_max_priority=rng.choice([{}, {"b": 1}]),
            max_num_waiting_tokens=rng.choice([0, 0, 200]),
            kv_role=rng.choice([KvRole.BOTH, KvRole.BOTH, *KvRole]),
            load_failure_policy=rng.choice(list(LoadFailurePolicy)),
        )
        self.connector = rng.random() < 0.6
        self.caching = rng.random() < 0.85
        self.num_blocks = rng.choice([8, 20, 60, 200])
        self.kv_options = {
            "full_prompt_hit": rng.random() < 0.5,
            "verify_tokens": rng.random() < 0.2,
            "track_misses": rng.random() < 0.2,
            "max_pinned_blocks": rng.choice([0, 0, 3]),
        }
        self.shares = rng.random() < 0.2
        self.step_s = rng.choice([0.0, 0.01, 100.0])
        """What the worker says a step takes: loads seem slow, or fast."""
        self.store = SimStore()
        self.hasher = BlockHasher(
            algorithm=HashAlgorithm.XXHASH_CBOR, block_size=self.block_size, none_hash=ROOT
        )
        self.scheduler = Scheduler(
            self.config,
            self.kv_config(),
            enable_connector=self.connector and self.caching,
            eos_token_ids=(3,),
            make_policy=self.make_policy,
        )
        self.worker = self.make_worker()
        self.plans = deque()
        self.lookups = []
        self.asked = []
        self.requests = []
        self.outputs = {}
        self.ended = {}
        self.now_s = 0.0
        self.sequence = 0
        self.prefixes = [self.tokens(rng.randint(1, 60)) for _ in range(3)]

    def kv_config(self) -> KVCacheConfig:
        return KVCacheConfig(
            num_blocks=self.num_blocks,
            groups=self.groups,
            enable_caching=self.caching,
            watermark=self.rng.choice([0.0, 0.1]),
            **self.kv_options,
        )

    def make_worker(self) -> SimWorker:
        worker = SimWorker(self.num_blocks, self.block_size, self.store, self.groups)
        worker.hold_saves = True
        return worker

    def make_policy(self, num_blocks: int) -> EvictionPolicy:
        return (
            TenantShares(num_blocks, {"a": 0.5, "b": 0.1}) if self.shares else LeastRecentlyUsed(num_blocks)
        )

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(4, VOCAB) for _ in range(count)]

    # -- what may happen ----------------------------------------------------------------------

    def arrive(self) -> None:
        prefix = self.rng.choice(self.prefixes)
        prompt = prefix[: self.rng.randint(0, len(prefix))] + self.tokens(self.rng.randint(1, 20))
        if self.rng.random() < 0.3:
            prompt = self.rng.choice(self.prefixes)  # whole, and again: hits of whole prompts
        prompt = prompt[: self.scheduler.config.max_model_len - 1]
        if not prompt:
            return
        self.sequence += 1
        chain = self.hasher.chain()
        chain.append(prompt)
        request = Request(
            request_id=RequestId(f"r{self.sequence}"),
            owner=None,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(
                max_tokens=self.rng.randint(1, 30),
                temperature=0.0,
                ignore_eos=self.rng.random() < 0.7,
                logprobs=self.rng.choice([None, None, 1]),
                prompt_logprobs=self.rng.choice([None, None, None, 0]),
            ),
            chain=chain,
            arrival_s=self.now_s,
            sequence=self.sequence,
            priority=self.rng.randint(0, 2),
            tenant=self.rng.choice("abc"),
            pin=self.rng.random() < 0.1,
            pin_ttl_s=self.rng.choice([0.0, 5.0, 50.0]),
        )
        if self.refused(request):
            return
        self.requests.append(request)
        self.outputs[request.sequence] = []

    def refused(self, request: Request) -> bool:
        refusal = None
        try:
            self.scheduler.add(request)
        except QueueFull as error:
            refusal = error
        if refusal is None:
            assert request.priority >= self.config.tenant_max_priority.get(request.tenant, 0)
            return False
        assert refusal.limit is QueueLimit.TOKENS
        assert MIN_RETRY_S <= refusal.retry_after_s <= MAX_RETRY_S
        return True

    def step(self) -> None:
        choices = [
            (self.arrive, 4),
            (self.execute, 12),
            (self.answer_lookup, 6),
            (self.finish_load, 6),
            (self.finish_saves, 4),
            (self.cancel, 1),
            (self.reset, 0.3),
            (self.lose_worker, 0.2),
        ]
        action = self.rng.choices([c[0] for c in choices], [c[1] for c in choices])[0]
        action()
        self.now_s += self.rng.random()
        self.plan()
        self.check()

    def plan(self) -> None:
        while (plan := self.scheduler.plan_step(now_s=self.now_s)) is not None:
            assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
            assert len(plan.scheduled) == len({item.handle for item in plan.scheduled})
            self.plans.append(plan)
        started = self.scheduler.connector.take_lookups(self.now_s)
        self.lookups += started
        self.asked += started

    def execute(self) -> None:
        if not self.plans:
            return
        result = self.worker.execute(self.plans.popleft())
        result = msgspec.structs.replace(result, model_time_s=self.step_s * (0.5 + self.rng.random()))
        for output in self.scheduler.apply_result(result, now_s=self.now_s):
            tokens = self.outputs[output.request.sequence]
            assert output.first_index == len(tokens)
            tokens += output.token_ids
            self.check_logprobs(output)
            if output.finish_reason is not None:
                self.end(output.request, output.finish_reason)

    def check_logprobs(self, output: Output) -> None:
        request, sampling = output.request, output.request.sampling
        first = request.num_prompt_tokens + output.first_index
        rows, prompt_rows = b"", b""
        if sampling.logprobs is not None:
            rows = expected_logprobs(request.token_ids, first, sampling.logprobs)
        if sampling.prompt_logprobs is not None and output.first_index == 0:
            prompt = request.token_ids[: request.num_prompt_tokens]
            prompt_rows = expected_logprobs(prompt, 1, sampling.prompt_logprobs)
        assert (output.logprobs, output.prompt_logprobs) == (rows, prompt_rows)

    def end(self, request: Request, reason: FinishReason) -> None:
        assert request.sequence not in self.ended, "ended twice"
        self.ended[request.sequence] = reason

    def answer_lookup(self) -> None:
        if not self.lookups:
            return
        request, attempt = self.lookups.pop(self.rng.randrange(len(self.lookups)))
        hashes = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        stored = self.store.stored(
            self.scheduler.manager.groups, hashes, lambda: self.rng.choice(["host", "external"])
        )
        reached = self.rng.random() >= 0.1
        self.scheduler.answer_lookup(
            request,
            attempt,
            stored if reached else NOTHING_STORED,
            self.store.generation if reached else None,
        )

    def finish_load(self) -> None:
        if self.worker.loads:
            load = self.rng.choice(self.worker.loads)
            fails = self.rng.random() < 0.3
            report = self.worker.end_load(load, lambda: fails and self.rng.random() < 0.4)
            for output in self.scheduler.end_load([report], now_s=self.now_s):
                assert self.config.load_failure_policy is LoadFailurePolicy.FAIL
                assert "kv_load_failure_policy" in output.error
                self.end(output.request, output.finish_reason)

    def finish_saves(self) -> None:
        self.scheduler.connector.saves_ended(self.worker.end_saves(self.rng.randint(1, 20)))

    def cancel(self) -> None:
        alive = [request for request in self.requests if request.sequence not in self.ended]
        if alive:
            request = self.rng.choice(alive)
            self.scheduler.finish(request, FinishReason.ABORT)
            self.end(request, FinishReason.ABORT)

    def reset(self) -> None:
        external = self.rng.random() < 0.5
        if external and self.connector:
            self.store.generation += 1
            self.store.blocks.clear()
            self.scheduler.connector.set_generation(self.store.generation)
        self.scheduler.reset_prefix_cache(preempt_running=self.rng.random() < 0.7)

    def lose_worker(self) -> None:
        self.plans.clear()
        self.asked.clear()
        self.scheduler.lose_worker()
        self.worker = self.make_worker()
        for output in self.scheduler.open_session(self.config, self.kv_config(), (3,)):
            self.end(output.request, output.finish_reason)

    # -- what must hold -----------------------------------------------------------------------

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.manager.check_invariants()
        assert len(scheduler.running) <= scheduler.config.max_num_seqs
        alive = {request.sequence for request in scheduler.unfinished()}
        assert alive == {r.sequence for r in self.requests if r.sequence not in self.ended}
        waiting = [r for r in scheduler.unfinished() if r.status is not RequestStatus.RUNNING]
        assert scheduler.num_waiting_tokens == sum(request.queued_tokens for request in waiting)
        assert all(request.queued_tokens for request in waiting)
        self.check_loads()
        self.check_lookups()
        for request in scheduler.running.values():
            assert request.queued_tokens == 0
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens <= request.num_tokens + request.num_placeholders

    def check_loads(self) -> None:
        scheduler, gate = self.scheduler, self.scheduler.gate
        assert len(scheduler.loading) <= self.config.max_concurrent_loads
        filling = [digest for request in scheduler.loading.values() for digest in self.filled_by(request)]
        assert len(filling) == len(set(filling)), "a block is loaded twice"
        holders = [*scheduler.loading.values(), *(r for r in scheduler.waiting if r.admitted)]
        assert gate.num_loading_blocks == sum(map(self.num_held, scheduler.loading.values()))
        assert gate.num_held_blocks <= gate.limit_blocks or len(holders) == 1
        assert bool(gate.num_held_blocks) is bool(holders)
        assert holders or not gate.deferred, "nobody will let the deferred ones try again"

    def check_lookups(self) -> None:
        """The store is asked at most twice for a request, and again after each preemption."""
        asked: dict[tuple[int, int], int] = {}
        for request, attempt in self.asked:
            asked[request.sequence, attempt] = asked.get((request.sequence, attempt), 0) + 1
        for (_, attempt), count in asked.items():
            assert count <= (2 if attempt else 1)

    def num_held(self, request: Request) -> int:
        """Blocks that its load fills, over all groups."""
        first = request.num_computed_tokens // self.block_size
        end = first + request.external.load_tokens // self.block_size
        tables = self.scheduler.manager.block_ids(request.request_id)
        return sum(block_id != 0 for table in tables for block_id in table[first:end])

    def filled_by(self, request: Request) -> list[bytes]:
        first = request.num_computed_tokens // self.block_size
        return request.block_hashes[first : first + request.external.load_tokens // self.block_size]

    def drain(self) -> None:
        for _ in range(20_000):
            if not self.scheduler.unfinished() and not self.plans and not self.worker.loads:
                return
            self.now_s += 0.5
            self.answer_lookup()
            self.finish_load()
            self.finish_saves()
            self.plan()
            self.execute()
            self.check()
        raise AssertionError(f"no progress: {[r.status for r in self.scheduler.unfinished()]}")

    def check_outputs(self) -> None:
        for request in self.requests:
            tokens = self.outputs[request.sequence]
            prompt = request.token_ids[: request.num_prompt_tokens]
            right = expected_output(prompt, len(tokens))
            assert tokens == right, request.request_id
            reason = self.ended[request.sequence]
            if reason is FinishReason.LENGTH:
                full = len(prompt) + len(tokens) >= self.scheduler.config.max_model_len
                assert full or len(tokens) == request.sampling.max_tokens
            if reason is FinishReason.STOP:
                assert tokens[-1] == 3
                assert not request.sampling.ignore_eos


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("hybrid", [False, True])
def test_every_request_ends_once_with_the_right_tokens(seed: int, hybrid: bool) -> None:
    print(f"seed {seed}")
    simulation = Simulation(seed, hybrid=hybrid)
    for _ in range(400):
        simulation.step()
    simulation.drain()
    simulation.check_outputs()
    scheduler = simulation.scheduler
    for pin in scheduler.pins(now_s=simulation.now_s):
        assert scheduler.unpin(pin.pin_id)
    assert scheduler.num_hash_collisions == 0
    assert scheduler.manager.usage == 0.0
    assert set(simulation.ended) == {request.sequence for request in simulation.requests}
