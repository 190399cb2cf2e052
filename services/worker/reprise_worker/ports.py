"""What the step loop needs from the outside, and what the outside tells it."""

from dataclasses import dataclass
from typing import Protocol

from reprise_core.steps import StepPlan, StepResult, TransferReport


@dataclass(frozen=True, slots=True)
class SessionBegan:
    session: bytes


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """All state of the session is to be dropped; answered by `SchedulerPort.session_released`."""


@dataclass(frozen=True, slots=True)
class PlanArrived:
    session: bytes
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Event = SessionBegan | SessionEnded | PlanArrived | Stop


class SchedulerPort(Protocol):
    """Thread-safe; nothing here waits. Messages of a session that is over are dropped."""

    def send_result(self, session: bytes, result: StepResult) -> None: ...

    def send_transfers(self, session: bytes, report: TransferReport) -> None: ...

    def drop_session(self, session: bytes) -> None:
        """The session cannot go on: ends it and greets the scheduler again."""

    def session_released(self) -> None:
        """The state of the ended session is gone; a new one may begin."""


class SchedulerConnection(SchedulerPort, Protocol):
    def start(self) -> None:
        """The model is loaded: greets the scheduler."""

    def stop(self) -> None:
        """Waits until nothing of it runs any more."""


class TransferSessions(Protocol):
    def begin_session(self, session: bytes) -> None:
        """Drops what an earlier session left in flight; on return nothing of it is written any more."""
