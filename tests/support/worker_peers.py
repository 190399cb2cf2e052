"""A scheduler's and a store's side of the wire, as small as tests of the worker need them."""

import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from reprise_core.steps import LoadReport, StepPlan, StepResult, TransferReport
from reprise_wire.block_transfer import (
    TRANSFER_VERSION,
    BlockKey,
    TransferHeader,
    TransferKind,
    decode_transfer,
    encode_transfer,
)
from reprise_wire.step_codec import (
    Body,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Welcome,
    decode_body,
    decode_header,
    encode,
)

BODIES: dict[str, type] = {
    Kind.HELLO: Hello,
    Kind.HEARTBEAT: Heartbeat,
    Kind.RESULT: StepResult,
    Kind.TRANSFER: TransferReport,
}


class SchedulerPeer:
    """One ROUTER; the test decides what is said."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*") -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self.endpoint: str = self.socket.getsockopt(zmq.LAST_ENDPOINT).decode()
        self.worker = b""
        self.session = b""

    def close(self) -> None:
        self.socket.close(0)

    def receive(self, *, timeout_s: float = 30.0) -> tuple[Header, Any]:
        assert self.socket.poll(int(timeout_s * 1000)), "the worker says nothing"
        self.worker, *frames = self.socket.recv_multipart()
        header = decode_header(frames)
        return header, decode_body(header, frames, BODIES[header.kind])

    def wait_for(self, kind: Kind, *, timeout_s: float = 30.0) -> tuple[Header, Any]:
        """The next message of a kind, others passed over."""
        for _ in range(1000):
            header, body = self.receive(timeout_s=timeout_s)
            if header.kind == kind:
                return header, body
        raise AssertionError(f"no {kind} among 1000 messages")

    def wait_for_loads(self) -> tuple[LoadReport, ...]:
        """Of the next report that tells of any; others tell of saves."""
        while not (report := self.wait_for(Kind.TRANSFER)[1]).loads:
            pass
        return tuple(report.loads)

    def say(self, kind: Kind, body: Body, *, session: bytes | None = None, step_id: int = 0) -> None:
        chosen = self.session if session is None else session
        self.socket.send_multipart([self.worker, *encode(kind, body, session=chosen, step_id=step_id)])

    def welcome(self, *, timeout_s: float = 60.0) -> Hello:
        _, hello = self.wait_for(Kind.HELLO, timeout_s=timeout_s)
        self.session = secrets.token_bytes(16)
        self.say(Kind.WELCOME, Welcome(heartbeat_interval_s=0.1, engine_id="test"))
        assert isinstance(hello, Hello)
        return hello

    def plan(self, plan: StepPlan) -> None:
        self.say(Kind.PLAN, plan, step_id=plan.step_id)

    def run(self, plan: StepPlan) -> StepResult:
        self.plan(plan)
        _, result = self.wait_for(Kind.RESULT)
        assert isinstance(result, StepResult)
        assert result.step_id == plan.step_id
        return result


class StorePeer:
    """A ROUTER and a dict. `serve_one` answers one message; `change` may alter a loaded value."""

    def __init__(self) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("tcp://127.0.0.1:*")
        self.endpoint: str = self.socket.getsockopt(zmq.LAST_ENDPOINT).decode()
        self.values: dict[BlockKey, bytes] = {}
        self.change: Callable[[bytes], bytes] = lambda value: value

    def close(self) -> None:
        self.socket.close(0)

    def serve_one(self, *, timeout_s: float = 30.0) -> TransferHeader:
        worker, header, values = self.receive(timeout_s=timeout_s)
        self.answer(worker, header, values)
        return header

    def receive(self, *, timeout_s: float = 30.0) -> tuple[bytes, TransferHeader, list[bytes]]:
        """The next message that is neither a greeting (answered here: no shared memory) nor a release."""
        while True:
            assert self.socket.poll(int(timeout_s * 1000)), "the worker asks nothing"
            worker, *frames = self.socket.recv_multipart()
            header = decode_transfer(frames)
            if header.kind == TransferKind.HELLO:
                welcome = TransferHeader(TRANSFER_VERSION, TransferKind.WELCOME, header.transfer_id)
                self.socket.send_multipart([worker, encode_transfer(welcome)])
            elif header.kind != TransferKind.RELEASE:
                return worker, header, frames[1:]

    def answer(self, worker: bytes, header: TransferHeader, values: list[bytes]) -> None:
        if header.kind == TransferKind.SAVE:
            self.values.update(zip(header.keys, values, strict=True))
            accepted = (True,) * len(values)
            answer = TransferHeader(
                TRANSFER_VERSION, TransferKind.SAVED, header.transfer_id, accepted=accepted
            )
            self.socket.send_multipart([worker, encode_transfer(answer)])
            return
        answer = msgspec.structs.replace(header, kind=TransferKind.LOADED)
        found = [self.values.get(key) for key in header.keys]
        frames = [b"" if value is None else self.change(value) for value in found]
        self.socket.send_multipart([worker, encode_transfer(answer), *frames])
