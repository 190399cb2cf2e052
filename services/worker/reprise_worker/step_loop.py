"""The step thread: takes events in order, executes plans, answers."""

from queue import SimpleQueue

from reprise_runtime.logs import LimitedLog, get_logger
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.ports import (
    Event,
    PlanArrived,
    SchedulerPort,
    SessionBegan,
    SessionEnded,
    TransferSessions,
)
from reprise_worker.runner import BadPlan, Runner

log = get_logger()


class StepLoop:
    """Invariant: requests in the runner belong to `session`; none while there is no session."""

    def __init__(
        self,
        inbox: SimpleQueue[Event],
        runner: Runner,
        scheduler: SchedulerPort,
        transfers: TransferSessions,
        metrics: WorkerMetrics,
    ) -> None:
        self._inbox = inbox
        self._runner = runner
        self._scheduler = scheduler
        self._transfers = transfers
        self._metrics = metrics
        self._session = b""
        self._limited = LimitedLog()

    def run(self) -> None:
        """Until `Stop`."""
        while True:
            event = self._inbox.get()
            if isinstance(event, PlanArrived):
                self._execute(event)
            elif isinstance(event, SessionBegan):
                self._enter(event.session)
            elif isinstance(event, SessionEnded):
                self._enter(b"")
                self._scheduler.session_released()
            else:
                return

    def _enter(self, session: bytes) -> None:
        self._session = session
        self._runner.reset()
        self._transfers.begin_session(session)
        self._metrics.requests.set(0)

    def _execute(self, event: PlanArrived) -> None:
        if event.session != self._session or not self._session:
            self._metrics.messages_stale.inc()
            return
        try:
            result = self._runner.execute(event.plan)
        except BadPlan as error:
            self._limited.warning(log, "plan refused, session dropped", problem=str(error))
            self._session = b""  # further plans of it are stale
            self._scheduler.drop_session(event.session)
            return
        self._scheduler.send_result(event.session, result)
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe(result.model_time_s)
        self._metrics.tokens_computed.inc(event.plan.num_tokens)
        self._metrics.tokens_sampled.inc(len(result.token_ids) // 4)
        self._metrics.requests.set(self._runner.num_requests)
