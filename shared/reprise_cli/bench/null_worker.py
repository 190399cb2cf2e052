"""A worker that computes nothing and answers at once: `python -m reprise_cli.bench.null_worker ENDPOINT`."""

import sys
import uuid

import zmq

from reprise_core.models import KvGroup, ModelInfo, WorkerCapacity
from reprise_core.steps import StepPlan, StepResult, pack_ids
from reprise_wire.step_codec import Heartbeat, Hello, Kind, decode_body, decode_header, encode

BLOCK_SIZE = 16
NUM_BLOCKS = 200_001
MAX_MODEL_LEN = 100_000
VOCAB_SIZE = 50_000
TOKEN = 7


def hello() -> Hello:
    return Hello(
        worker_id=uuid.uuid4().hex,
        rank=0,
        world_size=1,
        model=ModelInfo(
            name="null",
            path="",
            architecture="Null",
            dtype="none",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(0,),
            fingerprint="0" * 32,
        ),
        capacity=WorkerCapacity(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            block_nbytes=1,
            groups=(KvGroup(kind="full_attention", block_size=BLOCK_SIZE, num_layers=1),),
            max_num_batched_tokens=1 << 20,
        ),
    )


def main(endpoint: str) -> None:
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart(encode(Kind.HELLO, hello(), session=b""))
    session = b""
    while True:
        if not socket.poll(500):
            socket.send_multipart(
                encode(Kind.HEARTBEAT, Heartbeat(last_step_id=0, busy=False), session=session)
            )
            continue
        frames = socket.recv_multipart()
        header = decode_header(frames)
        if header.kind == Kind.WELCOME:
            session = header.session
        elif header.kind == Kind.PLAN:
            plan = decode_body(header, frames, StepPlan)
            handles = [item.handle for item in plan.scheduled if item.sample]
            result = StepResult(plan.step_id, pack_ids(handles), pack_ids([TOKEN] * len(handles)), 0.0)
            socket.send_multipart(encode(Kind.RESULT, result, session=session, step_id=plan.step_id))


if __name__ == "__main__":
    main(sys.argv[1])
