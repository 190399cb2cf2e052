"""A subscriber as somebody else would write it: pyzmq and msgpack, from the wire description alone.

Nothing here comes from this project: three frames live, a replay asked for by DEALER, copies counted.
"""

import threading
from collections import Counter

import msgspec
import zmq

END = b"\xff" * 8


class PlainSubscriber:
    """Follows one publisher in a thread; `held` counts copies by (hash, group, medium)."""

    def __init__(self, events: str, replay: str, *, skip_every: int = 0) -> None:
        """`skip_every`: each so many live messages one is thrown away, as a network would."""
        self.held: Counter[tuple[int, int, str]] = Counter()
        self.expected = 0
        self.num_replayed = 0
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(b"kv@")
        self._sub.connect(events)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(replay)
        self._skip_every = skip_every
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(10)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        num_received = 0
        while not self._stopping.is_set():
            if not self._sub.poll(100):
                continue
            _topic, number, payload = self._sub.recv_multipart()
            num_received += 1
            if self._skip_every and num_received % self._skip_every == 0:
                continue
            sequence = int.from_bytes(number, "big")
            if sequence > self.expected:
                self._replay()
            if sequence == self.expected:
                self._apply(payload)
                self.expected += 1

    def _replay(self) -> None:
        self._dealer.send_multipart([b"", self.expected.to_bytes(8, "big")])
        while True:
            _empty, _topic, number, payload = self._dealer.recv_multipart()
            if number == END:
                return
            sequence = int.from_bytes(number, "big")
            if sequence >= self.expected:
                assert sequence == self.expected, "the replay has a hole"
                self.num_replayed += 1
                self._apply(payload)
                self.expected += 1

    def _apply(self, payload: bytes) -> None:
        _ts, events, _rank = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.held.clear()
                continue
            step = 1 if event["type"] == "BlockStored" else -1
            for block_hash in event["block_hashes"]:
                key = block_hash, event.get("group_idx") or 0, event.get("medium") or "GPU"
                self.held[key] += step
                assert self.held[key] >= 0
                if not self.held[key]:
                    del self.held[key]
