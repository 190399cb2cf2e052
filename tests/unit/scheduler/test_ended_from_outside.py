"""A deadline or an abort, in every state that a request can be in: it ends once, and its blocks are free
by the next plan."""

from collections.abc import Callable

import pytest

from reprise_core.requests import FinishReason
from reprise_scheduler.sched.request import Request, RequestStatus
from support.sched_driver import Driver
from support.sim_worker import expected_output

PROMPT = [4 + i * i % 40 for i in range(21)]
OTHER = [30 + i % 9 for i in range(9)]
ENDED = FinishReason.ERROR
State = Callable[[Driver], Request]


def late(driver: Driver) -> Request:
    return driver.add("late", PROMPT, max_tokens=30)


def waiting(driver: Driver) -> Request:
    request = late(driver)
    assert request.status is RequestStatus.WAITING
    return request


def waiting_behind_others(driver: Driver) -> Request:
    for i in range(8):
        driver.add(f"before{i}", OTHER, max_tokens=4)
    request = late(driver)
    driver.step()
    assert request.status is RequestStatus.WAITING
    return request


def computing_its_prompt(driver: Driver) -> Request:
    request = late(driver)
    driver.step()
    assert 0 < request.num_computed_tokens < len(PROMPT)
    return request


def running(driver: Driver) -> Request:
    request = late(driver)
    while not driver.outputs["late"]:
        driver.step()
    assert request.status is RequestStatus.RUNNING
    return request


def preempted(driver: Driver) -> Request:
    request = running(driver)
    assert driver.scheduler.reset_prefix_cache(preempt_running=True)
    assert request.status is RequestStatus.PREEMPTED
    return request


def asking_the_store(driver: Driver) -> Request:
    request = late(driver)
    driver.plan()
    assert driver.scheduler.connector.looking_up
    return request


def stored(driver: Driver) -> Request:
    """The store has the prompt's blocks, this engine has none."""
    driver.add("earlier", PROMPT)
    driver.run()
    assert driver.scheduler.reset_prefix_cache(preempt_running=False)
    return late(driver)


def loading(driver: Driver) -> Request:
    driver.hold_loads = True
    request = stored(driver)
    driver.step()
    assert request.status is RequestStatus.LOADING
    return request


def loaded(driver: Driver) -> Request:
    request = loading(driver)
    driver.hold_loads = False
    driver.end_loads()
    assert request.admitted
    assert request.status is RequestStatus.WAITING
    return request


STATES = (waiting, waiting_behind_others, computing_its_prompt, running, preempted)
WITH_STORE = (asking_the_store, loading, loaded)


@pytest.mark.parametrize("state", [*STATES, *WITH_STORE])
def test_it_ends_once_and_frees_its_blocks(state: State) -> None:
    driver = Driver(connector=state in WITH_STORE, max_num_seqs=4, max_num_batched_tokens=16)
    request = state(driver)
    handle, outputs = request.handle, list(driver.outputs["late"])
    driver.scheduler.finish(request, ENDED)
    driver.scheduler.finish(request, FinishReason.ABORT)
    assert request.finish_reason is ENDED
    plan = driver.step()
    if state is loading:
        # Its blocks are being written to: they are free when that has ended.
        assert driver.scheduler.manager.usage > 0
        driver.hold_loads = False
        driver.end_loads()
    elif handle:
        assert plan is not None
        assert handle in plan.removed
    assert driver.scheduler.manager.usage == 0 or state is waiting_behind_others
    assert request not in driver.scheduler.unfinished()
    driver.add("next", OTHER, max_tokens=6)
    driver.run()
    assert driver.outputs["next"] == expected_output(OTHER, 6)
    assert driver.outputs["late"] == outputs
    assert "late" not in driver.finished
    assert driver.scheduler.manager.usage == 0
    assert driver.scheduler.num_waiting_tokens == 0


@pytest.mark.parametrize("num_ahead", [1, 2])
def test_with_steps_in_flight_they_are_executed_as_sent_and_bring_nothing(num_ahead: int) -> None:
    driver = Driver(async_scheduling=True)
    request = running(driver)
    driver.add("other", OTHER, max_tokens=10)
    plans = [plan for _ in range(num_ahead) if (plan := driver.plan()) is not None]
    assert len(plans) == num_ahead
    outputs, handle = list(driver.outputs["late"]), request.handle
    driver.scheduler.finish(request, ENDED)
    assert driver.scheduler.manager.usage < 1
    for plan in plans:
        driver.execute(plan)
    next_plan = driver.plan()
    assert next_plan is not None
    assert handle in next_plan.removed
    driver.execute(next_plan)
    driver.run()
    assert driver.outputs["late"] == outputs
    assert driver.outputs["other"] == expected_output(OTHER, 10)
    assert driver.scheduler.manager.usage == 0
