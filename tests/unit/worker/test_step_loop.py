"""Events are taken in order; plans of another session are dropped; a bad plan ends the session."""

from queue import SimpleQueue

import pytest
from prometheus_client import CollectorRegistry

from reprise_core.steps import (
    AddedRequest,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TransferReport,
    pack_ids,
)
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.ports import Event, PlanArrived, SessionBegan, SessionEnded, Stop
from reprise_worker.step_loop import StepLoop
from support.runner_driver import GREEDY, NoMover

FIRST, SECOND = b"1" * 16, b"2" * 16


class Journal(NoMover):
    """A scheduler and transfers that write down what they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[object, ...]] = []

    def send_result(self, session: bytes, result: StepResult) -> None:
        self.entries.append(("result", session, result.step_id))

    def send_transfers(self, session: bytes, report: TransferReport) -> None:
        raise AssertionError("the step loop reports no loads")

    def drop_session(self, session: bytes) -> None:
        self.entries.append(("drop", session))

    def session_released(self) -> None:
        self.entries.append(("released",))

    def begin_session(self, session: bytes) -> None:
        self.entries.append(("begin", session))


def run(*events: Event) -> tuple[list[tuple[object, ...]], CollectorRegistry]:
    from support.runner_driver import Driver
    from support.tiny_models import paged, small_config, small_model

    journal, registry, inbox = Journal(), CollectorRegistry(), SimpleQueue[Event]()
    driver = Driver(paged(small_model(small_config("Llama"))))
    for event in (*events, Stop()):
        inbox.put(event)
    StepLoop(inbox, driver.runner, journal, journal, WorkerMetrics(registry)).run()
    return journal.entries, registry


def first_plan() -> StepPlan:
    added = AddedRequest(1, pack_ids([3, 4, 5]), 3, 0, (pack_ids([1]),), GREEDY)
    return StepPlan(1, added=(added,), scheduled=(ScheduledRequest(1, 0, 3, (), True),))


def test_plans_of_the_session_are_answered() -> None:
    second = StepPlan(2, scheduled=(ScheduledRequest(1, 3, 1, (), True),))
    entries, registry = run(SessionBegan(FIRST), PlanArrived(FIRST, first_plan()), PlanArrived(FIRST, second))
    assert entries == [("begin", FIRST), ("result", FIRST, 1), ("result", FIRST, 2)]
    assert registry.get_sample_value("reprise_worker_tokens_computed_total") == 4
    assert registry.get_sample_value("reprise_worker_tokens_sampled_total") == 2
    assert registry.get_sample_value("reprise_worker_requests") == 1


def test_a_new_session_starts_from_nothing() -> None:
    entries, registry = run(
        SessionBegan(FIRST),
        PlanArrived(FIRST, first_plan()),
        SessionEnded(),
        PlanArrived(FIRST, StepPlan(2)),
        SessionBegan(SECOND),
        PlanArrived(FIRST, StepPlan(2)),
        PlanArrived(SECOND, first_plan()),
    )
    assert entries == [
        ("begin", FIRST),
        ("result", FIRST, 1),
        ("begin", b""),
        ("released",),
        ("begin", SECOND),
        ("result", SECOND, 1),
    ]
    assert registry.get_sample_value("reprise_worker_messages_stale_total") == 2


@pytest.mark.parametrize("bad", [StepPlan(5), StepPlan(2, removed=(77,))])
def test_a_plan_that_does_not_fit_drops_the_session_once(bad: StepPlan) -> None:
    entries, _ = run(
        SessionBegan(FIRST),
        PlanArrived(FIRST, first_plan()),
        PlanArrived(FIRST, bad),
        PlanArrived(FIRST, bad),
    )
    assert entries == [("begin", FIRST), ("result", FIRST, 1), ("drop", FIRST)]
