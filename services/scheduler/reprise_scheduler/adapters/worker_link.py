"""The worker's ZMQ link, scheduler side: hello, sessions, heartbeats, plans out, results in."""

import asyncio
import secrets
import time

import zmq

from reprise_core.errors import DataLoss, RepriseError
from reprise_core.steps import StepPlan, StepResult, TransferReport
from reprise_runtime.logs import LimitedLog, get_logger
from reprise_runtime.zmq_sockets import SocketReader, bind
from reprise_scheduler.metrics import LinkMetrics
from reprise_scheduler.ports import WorkerEvents
from reprise_scheduler.probe import Mark, Probe
from reprise_wire.step_codec import (
    PROTOCOL_VERSION,
    SESSION_ID_NBYTES,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Refused,
    Stale,
    VersionMismatch,
    Welcome,
    check_version,
    decode_body,
    decode_header,
    encode,
)


class WorkerLink:
    """One worker at a time: the newest hello wins, messages of any other session are dropped."""

    def __init__(
        self,
        endpoint: str,
        events: WorkerEvents,
        metrics: LinkMetrics,
        probe: Probe,
        *,
        engine_id: str,
        timeout_s: float,
    ) -> None:
        self._probe = probe
        self._endpoint = endpoint
        self._events = events
        self._metrics = metrics
        self._engine_id = engine_id
        self._timeout_s = timeout_s
        self._log = get_logger()
        self._limited = LimitedLog()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._reader = SocketReader(self._socket, self._on_message)
        self._watchdog: asyncio.Task[None] | None = None
        self._session = b""
        self._identity = b""
        self._worker_id = ""
        self._greeting = 0
        self._plans_sent = 0
        self._heard_s = 0.0

    async def start(self) -> None:
        bind(self._socket, self._endpoint)
        self._reader.start()
        self._watchdog = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._reader.stop()
        self._socket.close(0)
        self._context.term()

    def send_plan(self, plan: StepPlan) -> None:
        self._plans_sent += 1
        self._send(self._identity, Kind.PLAN, plan, step_id=plan.step_id)

    def _send(
        self,
        identity: bytes,
        kind: Kind,
        body: StepPlan | Welcome | Refused | Stale,
        *,
        session: bytes | None = None,
        step_id: int = 0,
    ) -> None:
        """`session` None = the present one."""
        frames = encode(kind, body, session=self._session if session is None else session, step_id=step_id)
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The watchdog will find the worker lost; it says hello again when it is back.
            self._limited.warning(self._log, "cannot send to worker", kind=kind, error=error.strerror)
        self._reader.kick()

    # -- messages -----------------------------------------------------------------------------

    def _on_message(self, frames: list[bytes]) -> None:
        self._probe.mark(Mark.RECEIVED)
        identity, *rest = frames
        try:
            header = decode_header(rest)
            check_version(header)
            self._dispatch(identity, header, rest)
        except VersionMismatch as error:
            self._refuse(identity, error.theirs, str(error))
        except DataLoss as error:
            self._metrics.malformed.inc()
            self._limited.warning(self._log, "malformed message from a worker", error=str(error))

    def _dispatch(self, identity: bytes, header: Header, frames: list[bytes]) -> None:
        if header.kind == Kind.HELLO:
            self._on_hello(identity, decode_body(header, frames, Hello))
            return
        if header.session != self._session or not self._session:
            self._metrics.stale.inc()
            self._send(identity, Kind.STALE, Stale(), session=header.session)
            return
        self._heard_s = time.monotonic()
        if header.kind == Kind.RESULT:
            result = decode_body(header, frames, StepResult)
            self._probe.mark(Mark.DECODED)
            self._events.on_result(result)
        elif header.kind == Kind.TRANSFER:
            self._events.on_transfer(decode_body(header, frames, TransferReport))
        elif header.kind == Kind.HEARTBEAT:
            decode_body(header, frames, Heartbeat)
        else:
            raise DataLoss(f"unknown kind {header.kind!r}")

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        if not self._is_repeated(identity, hello) and not self._open_session(identity, hello):
            return
        self._identity = identity
        self._heard_s = time.monotonic()
        self._send(
            identity,
            Kind.WELCOME,
            Welcome(heartbeat_interval_s=self._timeout_s / 5, engine_id=self._engine_id),
        )

    def _is_repeated(self, identity: bytes, hello: Hello) -> bool:
        """Whether the HELLO was sent while the answer to one before was on its way. A new session for it
        would end the one that has just begun, and so on for ever on a machine that is slow to answer.

        Plans that went to another connection are lost, and so is their session.
        """
        same_greeting = (hello.worker_id, hello.greeting) == (self._worker_id, self._greeting)
        return bool(self._session) and same_greeting and (identity == self._identity or not self._plans_sent)

    def _open_session(self, identity: bytes, hello: Hello) -> bool:
        if hello.world_size != 1:
            self._refuse(identity, PROTOCOL_VERSION, f"world size {hello.world_size}; only 1 is supported")
            return False
        if self._session and hello.worker_id != self._worker_id:
            self._log.info("another worker takes over", old=self._worker_id, new=hello.worker_id)
        self._session = b""
        try:
            self._events.on_session(hello.model, hello.capacity)
        except RepriseError as error:
            self._refuse(identity, PROTOCOL_VERSION, str(error))
            return False
        self._session = secrets.token_bytes(SESSION_ID_NBYTES)
        self._worker_id, self._greeting = hello.worker_id, hello.greeting
        self._plans_sent = 0
        self._metrics.sessions.inc()
        self._log.info(
            "worker registered",
            worker_id=hello.worker_id,
            model=hello.model.name,
            num_blocks=hello.capacity.num_blocks,
            block_size=hello.capacity.block_size,
        )
        return True

    def _refuse(self, identity: bytes, theirs: int, reason: str) -> None:
        self._metrics.refused.inc()
        self._limited.warning(self._log, "worker refused", reason=reason)
        self._send(
            identity,
            Kind.REFUSED,
            Refused(scheduler_version=PROTOCOL_VERSION, worker_version=theirs, reason=reason),
        )

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._timeout_s / 10)
            silent_s = time.monotonic() - self._heard_s
            if self._session and silent_s > self._timeout_s:
                self._session = b""
                self._metrics.lost.inc()
                self._log.warning("worker lost", silent_s=round(silent_s, 1))
                self._events.on_lost(f"no heartbeat for {silent_s:.1f} s")
