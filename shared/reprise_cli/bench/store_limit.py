"""What no load from the host tier can beat, for `reprise bench store`.

A load has its caller's thread wake another, which asks the store's process, waits for its answers, copies
each block out of shared memory into the cache and checks it. `BareLoads` does this and nothing else: the
process that it asks sends every message back as it is.
"""

import os
import select
import socket
import subprocess
import sys
import threading
import time

from reprise_cli.bench.store_blocks import block_hash, keyspace_of
from reprise_runtime.shared_memory import make_memory, read_into
from reprise_wire.block_codec import HEADER_NBYTES, check_header, check_payload, encode_header
from reprise_worker.kv_cache import KvCache
from reprise_worker.store_wire import StoreWire

MESSAGE_NBYTES_PER_BLOCK = 48
MAX_MESSAGE_NBYTES = 64 * 1024
PAGE_NBYTES = 4096


class BareLoads:
    def __init__(self, kv: KvCache, num_blocks: int) -> None:
        """Takes the values from the cache's first blocks, and loads into them."""
        self._kv = kv
        wire = StoreWire(keyspace_of(kv.block_nbytes), 0, kv.block_nbytes)
        self._blocks_per_message = wire.blocks_per_message
        self._format = kv.block_format(wire.fingerprints[0])
        self._stride = HEADER_NBYTES + kv.block_nbytes + PAGE_NBYTES
        self._memory = make_memory("bench", num_blocks * self._stride)
        for block in range(num_blocks):
            payload = self._payload(block)
            header = encode_header(payload, block_hash=block_hash(block), format=self._format)
            os.pwritev(self._memory.fd, [header, payload], block * self._stride)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._echo = subprocess.Popen(
                [sys.executable, "-m", "reprise_cli.bench.store_limit", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        self._wake_read, self._wake_write = os.pipe()
        self._loaded = threading.Event()
        self._num_blocks = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def load(self, num_blocks: int) -> float:
        """Seconds until every block is in the cache."""
        self._num_blocks = num_blocks
        self._loaded.clear()
        start_s = time.perf_counter()
        os.write(self._wake_write, b"\0")
        self._loaded.wait()
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._num_blocks = 0
        os.write(self._wake_write, b"\0")
        self._thread.join()
        self._ours.close()
        self._echo.wait()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._ours, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        num_done = 0
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self._wake_read in ready:
                os.read(self._wake_read, 1)
                if not self._num_blocks:
                    return
                num_done = 0
                for first in range(0, self._num_blocks, self._blocks_per_message):
                    self._ours.send(bytes((self._end(first) - first) * MESSAGE_NBYTES_PER_BLOCK))
            if self._ours.fileno() in ready:
                self._ours.recv(MAX_MESSAGE_NBYTES)
                for block in range(num_done, self._end(num_done)):
                    self._take(block)
                num_done = self._end(num_done)
                if num_done == self._num_blocks:
                    self._loaded.set()

    def _end(self, first: int) -> int:
        """Of the message that begins with this block."""
        return min(self._num_blocks, first + self._blocks_per_message)

    def _take(self, block: int) -> None:
        header, payload = bytearray(HEADER_NBYTES), self._payload(block)
        read_into(self._memory, block * self._stride, [header, payload])
        check_header(header, format=self._format, value_nbytes=HEADER_NBYTES + len(payload))
        check_payload(header, payload, block_hash=block_hash(block))

    def _payload(self, block: int) -> memoryview:
        payload = self._kv.block_memory(block)
        assert payload is not None
        return payload


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as peer:
        while message := peer.recv(MAX_MESSAGE_NBYTES):
            peer.send(message)


if __name__ == "__main__":
    main()
