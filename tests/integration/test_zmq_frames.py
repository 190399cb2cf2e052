"""A multipart message comes as `recv_multipart` gives it."""

import random

import pytest
import zmq

from reprise_wire.zmq_frames import receive_frames


def test_messages_come_whole_and_one_by_one() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    sent = [
        [rng.randbytes(rng.choice([0, 1, 100, 70_000])) for _ in range(rng.randint(1, 5))] for _ in range(200)
    ]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        router.linger = dealer.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(zmq.Again):
            receive_frames(router)
        dealer.routing_id = b"me"
        dealer.connect(f"tcp://127.0.0.1:{port}")
        for frames in sent:
            dealer.send_multipart(frames)
            assert router.poll(30_000)
            assert receive_frames(router) == [b"me", *frames]
        with pytest.raises(zmq.Again):
            receive_frames(router)
