"""The simulated worker behind a real ZMQ socket: what a scheduler under test talks to.

`python -m support.zmq_worker ENDPOINT` is one as a process, for signals; its steps take 10 ms.
"""

import sys
import threading
import uuid

import zmq

from reprise_core.extra_keys import LoraAdapter
from reprise_core.models import KvGroup, ModelInfo, WorkerCapacity
from reprise_core.steps import StepPlan, TransferReport
from reprise_wire.step_codec import Heartbeat, Hello, Kind, decode_body, decode_header, encode
from support.sim_worker import VOCAB, SimStore, SimWorker


class ZmqWorker:
    """One thread. `pause` makes it silent, as a stopped process is; `step_delay_s` slows every step."""

    def __init__(
        self,
        endpoint: str,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
        step_delay_s: float = 0.0,
        store: SimStore | None = None,
        adapters: tuple[LoraAdapter, ...] = (),
    ) -> None:
        self.worker_id = uuid.uuid4().hex
        self.sim = SimWorker(num_blocks, block_size, store or SimStore())
        self.session = b""
        self.sessions_opened = 0
        self._greeting = 0
        self.steps = 0
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._adapters = adapters
        self._step_delay_s = step_delay_s
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._stop = threading.Event()
        self._paused = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded_run, daemon=True)

    def start(self) -> "ZmqWorker":
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(5)
        self._socket.close(0)

    def pause(self) -> None:
        self._paused.set()

    def resume(self) -> None:
        self._paused.clear()

    def _guarded_run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.failure = error
            raise

    def _run(self) -> None:
        waits = 0
        while not self._stop.is_set():
            if self._paused.is_set():
                self._stop.wait(0.01)
                continue
            if not self.session and waits % 10 == 0:
                self._send(Kind.HELLO, self._hello())
            waits += 1
            if self._socket.poll(20):
                self._on_frames(self._socket.recv_multipart())
            elif self.session:
                self._send(Kind.HEARTBEAT, Heartbeat(last_step_id=self.steps, busy=False))

    def _on_frames(self, frames: list[bytes]) -> None:
        header = decode_header(frames)
        if header.kind == Kind.WELCOME:
            self.session = header.session
            self.sessions_opened += 1
        elif header.kind == Kind.STALE and header.session == self.session:
            self.session = b""
            self._greeting += 1
            self.sim = SimWorker(self._num_blocks, self._block_size, self.sim.store)
        elif header.kind == Kind.PLAN and header.session == self.session:
            self._stop.wait(self._step_delay_s)
            result = self.sim.execute(decode_body(header, frames, StepPlan))
            self.steps += 1
            self._send(Kind.RESULT, result, step_id=result.step_id)
            reports = [self.sim.end_load(load, lambda: False) for load in list(self.sim.loads)]
            if reports:
                self._send(Kind.TRANSFER, TransferReport(tuple(reports)))

    def _send(self, kind, body, *, step_id: int = 0) -> None:
        self._socket.send_multipart(encode(kind, body, session=self.session, step_id=step_id))

    def _hello(self) -> Hello:
        group = KvGroup(kind="full_attention", block_size=self._block_size, num_layers=1)
        return Hello(
            worker_id=self.worker_id,
            greeting=self._greeting,
            rank=0,
            world_size=1,
            model=ModelInfo(
                name="sim",
                path="/nowhere",
                architecture="Sim",
                dtype="float32",
                max_model_len=self._max_model_len,
                vocab_size=VOCAB,
                eos_token_ids=(3,),
                fingerprint="0" * 32,
                adapters=self._adapters,
            ),
            capacity=WorkerCapacity(
                num_blocks=self._num_blocks,
                block_size=self._block_size,
                block_nbytes=64,
                groups=(group,),
                max_num_batched_tokens=512,
            ),
        )


if __name__ == "__main__":
    ZmqWorker(sys.argv[1], step_delay_s=0.01)._run()
