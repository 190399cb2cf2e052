"""The processes around a publisher in `bench events`: `python -m` this module, ROLE, ENDPOINT and SHAPE.

They are told what to do by lines on stdin and answer by lines on stdout. Times are of the monotonic
clock, which all processes of a machine share.
"""

import os
import sys
import time
from collections.abc import Callable

import zmq

from reprise_cli.bench.event_batches import SHAPES, StepShape, filling_batches, step_batches
from reprise_core.kv_events import KvEventBatch
from reprise_wire.event_codec import encode_batch, pub_frames
from reprise_wire.event_intake import batch_frames

TOPIC = "kv@bench@model"
PREPARED_BATCHES = 1000
"""Different ones; they are sent over and over."""
SMALL_BYTES = 64
"""A payload up to this size has no events: it only tells that the line is open."""
RECEIVE_TIMEOUT_S = 30.0
BEAT = KvEventBatch(0.0, (), 0)


def reader(endpoint: str, shape: StepShape) -> None:
    """Says `hearing` on the first message; then for each line N, the time at which N batches were in."""
    socket = zmq.Context().socket(zmq.SUB)
    socket.rcvhwm = 0
    socket.rcvtimeo = int(RECEIVE_TIMEOUT_S * 1000)
    socket.subscribe(TOPIC)
    socket.connect(endpoint)
    socket.recv_multipart()
    say("hearing")
    for line in sys.stdin:
        remaining = int(line)
        while remaining:
            remaining -= len(socket.recv_multipart()[2]) > SMALL_BYTES
        say(time.monotonic())


def bare(endpoint: str, shape: StepShape) -> None:
    """The peer: a loop that encodes and sends."""
    socket = zmq.Context().socket(zmq.PUB)
    socket.sndhwm = 0
    socket.bind(endpoint)
    batches = step_batches(shape, PREPARED_BATCHES)
    sequence = 0

    def send(batch: KvEventBatch) -> None:
        nonlocal sequence
        socket.send_multipart(pub_frames(TOPIC, sequence, encode_batch(batch)))
        sequence += 1

    obey(lambda: send(BEAT), lambda number: send(batches[number % PREPARED_BATCHES]))


def feeder(endpoint: str, shape: StepShape) -> None:
    """A scheduler's side of the intake. What it sends is encoded beforehand, as a real one's encoding is not
    the publisher's work, and it has to be faster than what it feeds."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.sndhwm = 0
    socket.connect(endpoint)
    epoch = os.urandom(16)
    beat = encode_batch(BEAT)
    payloads = [encode_batch(batch) for batch in step_batches(shape, PREPARED_BATCHES)]
    more = int(zmq.SNDMORE)
    sequence = 0
    headers: list[bytes] = []
    """Of the next batches."""

    def prepare(count: int) -> None:
        headers[:] = [batch_frames(epoch, sequence + ahead, b"")[0] for ahead in range(count)]
        headers.reverse()

    def send(payload: bytes) -> None:
        nonlocal sequence
        if not headers:
            prepare(1)
        socket.send(headers.pop(), more)
        socket.send(payload)
        sequence += 1

    def fill(num_blocks: int) -> None:
        for batch in filling_batches(num_blocks):
            send(encode_batch(batch))

    obey(lambda: send(beat), lambda number: send(payloads[number % PREPARED_BATCHES]), prepare, fill)


def obey(
    beat: Callable[[], None],
    send: Callable[[int], None],
    prepare: Callable[[int], None] = lambda count: None,
    fill: Callable[[int], None] = lambda num_blocks: None,
) -> None:
    """`beat`; `send N`, answered with the times of its start and end; `pace N S`: N batches S seconds
    apart; `fill N` blocks."""
    say("ready")
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "send":
            prepare(int(numbers[0]))
        start_s = time.monotonic()
        if command == "beat":
            beat()
        elif command == "send":
            for number in range(int(numbers[0])):
                send(number)
        elif command == "pace":
            for number in range(int(numbers[0])):
                send(number)
                time.sleep(float(numbers[1]))
        elif command == "fill":
            fill(int(numbers[0]))
        say(start_s, time.monotonic())


def say(*words: object) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    {"reader": reader, "bare": bare, "feeder": feeder}[sys.argv[1]](sys.argv[2], SHAPES[sys.argv[3]])
