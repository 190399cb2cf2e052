"""The worker's side of the step protocol (`reprise_wire.step_codec`).

States: GREETING says HELLO at every interval until WELCOME; LIVE takes plans and sends results and
heartbeats; RELEASING waits until the step thread has dropped an ended session's state. The newest
WELCOME counts, in every state: the step thread takes events in order and drops what came before. A
session ends when the scheduler says STALE, when the connection breaks (messages may be lost then),
when plans come faster than the protocol allows, or when the step thread cannot go on with it.
"""

import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from queue import SimpleQueue

import msgspec
import zmq

from reprise_core.errors import DataLoss, FailedPrecondition
from reprise_core.steps import StepPlan, StepResult, TransferReport
from reprise_runtime.health import Readiness
from reprise_runtime.logs import LimitedLog, get_logger
from reprise_wire.step_codec import (
    PROTOCOL_VERSION,
    SESSION_ID_NBYTES,
    Body,
    Header,
    Heartbeat,
    Hello,
    Kind,
    MalformedFrame,
    Refused,
    Stale,
    Welcome,
    check_version,
    decode_body,
    decode_header,
    encode,
)
from reprise_worker.adapters.dealer import DealerThread
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.ports import Event, PlanArrived, SessionBegan, SessionEnded

log = get_logger()

# The scheduler has at most two plans in flight; more than this is no scheduler of ours.
MAX_PLANS_IN_FLIGHT = 4
# Services start in any order: a short wait is nothing to talk about.
QUIET_WAIT_S = 5.0
_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
CONDITION = "scheduler"


class SchedulerRefused(FailedPrecondition):
    """The scheduler does not want this worker; trying again would not help."""


class _State(Enum):
    GREETING = "greeting"
    LIVE = "live"
    RELEASING = "releasing"


class SchedulerLink(DealerThread):
    """Implements `ports.SchedulerPort`; events go to `inbox`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        hello: Hello,
        inbox: SimpleQueue[Event],
        heartbeat_interval_s: float,
        readiness: Readiness,
        metrics: WorkerMetrics,
        on_fatal: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            context,
            endpoint,
            name="scheduler-link",
            max_message_bytes=_MAX_MESSAGE_BYTES,
            on_fatal=on_fatal,
        )
        self._hello = hello
        self._inbox = inbox
        self._interval_s = heartbeat_interval_s
        self._readiness = readiness
        self._metrics = metrics
        self._clock = clock
        self._limited = LimitedLog()
        self._state = _State.GREETING
        self._session = b""
        self._outbox: deque[tuple[Kind, bytes, int, Body]] = deque()
        self._requests: deque[tuple[str, bytes]] = deque()  # from the step thread: what, session
        self._num_in_flight = 0
        self._last_step_id = 0
        self._next_beat_s = 0.0
        self._greeting_since_s = clock()
        readiness.unmet(CONDITION, f"no scheduler at {endpoint} yet")

    # ports.SchedulerPort, for the step thread and the store link.

    def send_result(self, session: bytes, result: StepResult) -> None:
        self._outbox.append((Kind.RESULT, session, result.step_id, result))
        self.wake()

    def send_transfers(self, session: bytes, report: TransferReport) -> None:
        self._outbox.append((Kind.TRANSFER, session, 0, report))
        self.wake()

    def drop_session(self, session: bytes) -> None:
        self._requests.append(("drop", session))
        self.wake()

    def session_released(self) -> None:
        self._requests.append(("released", b""))
        self.wake()

    # The thread's turns.

    def on_turn(self) -> float:
        while self._requests:
            what, session = self._requests.popleft()
            if what == "drop" and session == self._session:
                self._end_session("bad_plan")
            elif what == "released" and self._state is _State.RELEASING:
                self._greet()
        self._send_outbox()
        now_s = self._clock()
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._interval_s
            self._beat(now_s)
        return self._next_beat_s - self._clock()

    def on_connection(self, connected: bool) -> None:
        if connected:
            self._next_beat_s = 0.0  # greet at once
            return
        self._readiness.unmet(CONDITION, f"connection to the scheduler at {self._endpoint} is lost")
        if self._state is _State.LIVE:
            self._end_session("disconnected")

    def on_frames(self, frames: list[zmq.Frame]) -> None:
        buffers = [frame.buffer for frame in frames]
        try:
            header = decode_header(buffers)
            if header.kind == Kind.REFUSED:
                raise self._refusal(decode_body(header, buffers, Refused))
            check_version(header)
            self._dispatch(header, buffers)
        except DataLoss as error:
            self._metrics.frames_malformed.labels("scheduler").inc()
            self._limited.warning(log, "malformed frames from the scheduler", problem=str(error))

    def _dispatch(self, header: Header, buffers: list[memoryview]) -> None:
        if header.kind == Kind.WELCOME:
            self._welcome(header, decode_body(header, buffers, Welcome))
        elif header.kind == Kind.PLAN:
            self._plan(header, buffers)
        elif header.kind == Kind.STALE:
            decode_body(header, buffers, Stale)
            if self._state is _State.LIVE and header.session == self._session:
                self._end_session("stale")
        else:
            raise MalformedFrame(f"a scheduler does not send {header.kind!r}")

    def _welcome(self, header: Header, welcome: Welcome) -> None:
        if len(header.session) != SESSION_ID_NBYTES:
            raise MalformedFrame(f"session id of {len(header.session)} bytes")
        if self._state is _State.LIVE:
            if header.session == self._session:
                return  # the answer to a repeated HELLO
            self._metrics.sessions_dropped.labels("replaced").inc()
        self._state = _State.LIVE
        self._session = header.session
        self._num_in_flight = 0
        self._last_step_id = 0
        if welcome.heartbeat_interval_s > 0:
            self._interval_s = welcome.heartbeat_interval_s
            self._next_beat_s = min(self._next_beat_s, self._clock() + self._interval_s)
        self._inbox.put(SessionBegan(header.session))
        self._metrics.sessions.inc()
        self._readiness.met(CONDITION)
        log.info("session opened", engine_id=welcome.engine_id, session=header.session.hex()[:8])

    def _plan(self, header: Header, buffers: list[memoryview]) -> None:
        if self._state is not _State.LIVE or header.session != self._session:
            self._metrics.messages_stale.inc()
            return
        plan = decode_body(header, buffers, StepPlan)
        if self._num_in_flight >= MAX_PLANS_IN_FLIGHT:
            self._end_session("too_many_plans")
            return
        self._num_in_flight += 1
        self._inbox.put(PlanArrived(header.session, plan))

    def _send_outbox(self) -> None:
        """Sends in order. What cannot be sent waits for the connection, whose loss ends the session;
        so at most the plans in flight and the pending loads are ever waiting."""
        while self._outbox:
            kind, session, step_id, body = self._outbox[0]
            if session != self._session:
                self._outbox.popleft()
                self._metrics.messages_stale.inc()
                continue
            if not self.send(encode(kind, body, session=session, step_id=step_id)):
                return
            self._outbox.popleft()
            if kind is Kind.RESULT:
                self._num_in_flight -= 1
                self._last_step_id = step_id

    def _beat(self, now_s: float) -> None:
        if self._state is _State.LIVE:
            beat = Heartbeat(last_step_id=self._last_step_id, busy=self._num_in_flight > 0)
            self.send(encode(Kind.HEARTBEAT, beat, session=self._session))
        elif self._state is _State.GREETING and not self.send(encode(Kind.HELLO, self._hello, session=b"")):
            waited_s = round(now_s - self._greeting_since_s, 1)
            if waited_s >= QUIET_WAIT_S:
                self._limited.warning(
                    log, "waiting for the scheduler", endpoint=self._endpoint, waited_s=waited_s
                )

    def _end_session(self, reason: str) -> None:
        log.warning("session ended", reason=reason, session=self._session.hex()[:8])
        self._metrics.sessions_dropped.labels(reason).inc()
        self._readiness.unmet(CONDITION, f"the session with {self._endpoint} ended ({reason})")
        self._session = b""
        self._state = _State.RELEASING
        self._inbox.put(SessionEnded())

    def _greet(self) -> None:
        self._state = _State.GREETING
        self._hello = msgspec.structs.replace(self._hello, greeting=self._hello.greeting + 1)
        self._greeting_since_s = self._clock()
        self._next_beat_s = 0.0

    def _refusal(self, refused: Refused) -> SchedulerRefused:
        return SchedulerRefused(
            f"the scheduler at {self._endpoint} refused this worker: {refused.reason} (scheduler speaks "
            f"protocol version {refused.scheduler_version}, this worker {PROTOCOL_VERSION})"
        )
