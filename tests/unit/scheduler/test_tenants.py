"""Tenants: shares by weight, no starvation, and the best priority that each may have."""

import random
from collections import Counter

import pytest

from reprise_core.hash_chain import HashChain
from reprise_core.ids import RequestId
from reprise_core.requests import SamplingParams
from reprise_scheduler.sched import fair_queue
from reprise_scheduler.sched.config import SchedulingPolicy
from reprise_scheduler.sched.fair_queue import FairQueue
from reprise_scheduler.sched.request import Request
from support.sched_driver import Driver
from support.sim_worker import expected_output

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
CHAIN: HashChain = Driver().hasher.chain()


def request(sequence: int, tenant: str, *, priority: int = 0, num_tokens: int = 10) -> Request:
    return Request(
        request_id=RequestId(f"{tenant}{sequence}"),
        owner=None,
        token_ids=[7] * num_tokens,
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=1),
        chain=CHAIN,
        arrival_s=0.0,
        sequence=sequence,
        tenant=tenant,
        priority=priority,
    )


def serve(queue: FairQueue, count: int) -> str:
    served = []
    for _ in range(count):
        head = queue.pop()
        queue.charge(head.tenant, head.num_tokens)
        served.append(head.tenant)
    return "".join(served)


def test_tokens_are_shared_by_weight() -> None:
    queue = FairQueue(SchedulingPolicy.FCFS, {"a": 3.0})
    for sequence in range(40):
        queue.add(request(sequence, "a" if sequence < 20 else "b"))
    assert Counter(serve(queue, 16)) == {"a": 12, "b": 4}


def test_it_is_tokens_that_are_shared_not_requests() -> None:
    queue = FairQueue(SchedulingPolicy.FCFS, {"a": 1.0})
    for sequence in range(20):
        queue.add(request(sequence, "a", num_tokens=40))
        queue.add(request(100 + sequence, "b", num_tokens=10))
    assert Counter(serve(queue, 15)) == {"a": 3, "b": 12}


def test_being_idle_earns_no_credit() -> None:
    queue = FairQueue(SchedulingPolicy.FCFS, {"a": 1.0})
    for sequence in range(50):
        queue.add(request(sequence, "a"))
    assert serve(queue, 30) == "a" * 30
    for sequence in range(50, 60):
        queue.add(request(sequence, "b"))
    assert Counter(serve(queue, 10)) == {"a": 5, "b": 5}


def test_within_a_tenant_the_policy_holds() -> None:
    queue = FairQueue(SchedulingPolicy.PRIORITY, {"a": 1.0})
    for sequence, priority in enumerate((5, 1, 3)):
        queue.add(request(sequence, "a", priority=priority))
    assert [queue.pop().priority for _ in range(3)] == [1, 3, 5]
    assert queue.peek() is None


def test_a_flood_starves_nobody() -> None:
    queue = FairQueue(SchedulingPolicy.FCFS, {"loud": 100.0})
    for sequence in range(1000):
        queue.add(request(sequence, "loud"))
    queue.add(request(1000, "quiet"))
    queue.add(request(1001, "quiet"))
    assert "quietloud" in serve(queue, 5)
    assert "quiet" in serve(queue, 101)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_calls_keeps_the_count_and_serves_every_request_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {seed}")
    monkeypatch.setattr(fair_queue, "MAX_REMEMBERED_TENANTS", 6)
    rng = random.Random(seed)
    queue = FairQueue(rng.choice(list(SchedulingPolicy)), {"t0": 2.0})
    inside: dict[int, Request] = {}
    for sequence in range(500):
        action = rng.random()
        if action < 0.5:
            one = request(sequence, f"t{rng.randrange(12)}", priority=rng.randrange(3))
            queue.add(one)
            inside[one.sequence] = one
        elif action < 0.65 and inside:
            gone = inside.pop(rng.choice(list(inside)))
            assert queue.remove(gone)
            assert not queue.remove(gone)
        elif inside:
            head = queue.peek()
            assert head is queue.pop()
            del inside[head.sequence]
            queue.charge(head.tenant, head.num_tokens)
        assert len(queue) == len(inside)
        assert {one.sequence for one in queue} == set(inside)
        assert len(queue._times) <= 12
    while inside:
        del inside[queue.pop().sequence]
    assert queue.peek() is None


def test_a_light_tenant_gets_in_between_a_heavy_ones_requests() -> None:
    driver = Driver(max_num_seqs=1, tenant_weights={"heavy": 1.0, "light": 1.0})
    for i in range(6):
        driver.add(f"heavy{i}", [*PROMPT, i], max_tokens=3, tenant="heavy")
    driver.add("light", PROMPT[::-1], max_tokens=3, tenant="light")
    driver.run()
    assert list(driver.finished).index("light") <= 1
    assert driver.outputs["light"] == expected_output(PROMPT[::-1], 3)


def test_without_weights_who_came_first_is_served_first() -> None:
    driver = Driver(max_num_seqs=1)
    for i in range(4):
        driver.add(f"heavy{i}", [*PROMPT, i], max_tokens=1, tenant="heavy")
    driver.add("light", PROMPT[::-1], max_tokens=1, tenant="light")
    driver.run()
    assert list(driver.finished)[-1] == "light"


def test_a_priority_better_than_the_tenants_best_is_cut_and_counted() -> None:
    driver = Driver(policy=SchedulingPolicy.PRIORITY, max_num_seqs=1, tenant_max_priority={"guest": 5})
    pushy = driver.add("pushy", PROMPT, max_tokens=1, priority=-100, tenant="guest")
    modest = driver.add("modest", PROMPT, max_tokens=1, priority=9, tenant="guest")
    driver.add("own", PROMPT, max_tokens=1, priority=1)
    assert (pushy.priority, modest.priority) == (5, 9)
    assert driver.scheduler.counters.priority_cuts == 1
    driver.run()
    assert list(driver.finished) == ["own", "pushy", "modest"]
