"""What no load from the host tier can beat, for `reprise bench store`.

A load has its caller's thread wake another, which copies each block out of shared memory into the cache and
checks it. `BareLoads` does this and nothing else.
"""

import os
import threading
import time

from reprise_cli.bench.store_blocks import block_hash, keyspace_of
from reprise_runtime.shared_memory import make_memory, read_into
from reprise_wire.block_codec import HEADER_NBYTES, check_header, check_payload, encode_header
from reprise_worker._accel import native_copy
from reprise_worker.kv_cache import KvCache
from reprise_worker.store_wire import StoreWire

PAGE_NBYTES = 4096


class BareLoads:
    def __init__(self, kv: KvCache, num_blocks: int) -> None:
        """Takes the values from the cache's first blocks, and loads into them."""
        self._kv = kv
        self._native = native_copy()
        self._format = kv.block_format(
            StoreWire(keyspace_of(kv.block_nbytes), 0, kv.block_nbytes).fingerprints[0]
        )
        self._stride = HEADER_NBYTES + kv.block_nbytes + PAGE_NBYTES
        self._memory = make_memory("bench", num_blocks * self._stride)
        for block in range(num_blocks):
            payload = self._payload(block)
            header = encode_header(payload, block_hash=block_hash(block), format=self._format)
            os.pwritev(self._memory.fd, [header, payload], block * self._stride)
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
        os.close(self._wake_write)
        self._thread.join()
        os.close(self._wake_read)

    def _serve(self) -> None:
        while os.read(self._wake_read, 1):
            self._take(self._num_blocks)
            self._loaded.set()

    def _take(self, num_blocks: int) -> None:
        if self._native is None:
            for block in range(num_blocks):
                self._take_one(block)
            return
        nbytes = HEADER_NBYTES + self._kv.block_nbytes
        self._native.copy_blocks(
            self._memory.map(),
            self._memory.nbytes,
            self._kv.address,
            self._kv.block_nbytes,
            num_blocks,
            self._format.fields,
            tuple((block * self._stride, nbytes, block, block_hash(block)) for block in range(num_blocks)),
        )

    def _take_one(self, block: int) -> None:
        header, payload = bytes(self._memory.view(block * self._stride, HEADER_NBYTES)), self._payload(block)
        read_into(self._memory, block * self._stride + HEADER_NBYTES, payload)
        check_header(header, format=self._format, value_nbytes=HEADER_NBYTES + len(payload))
        check_payload(header, payload, block_hash=block_hash(block))

    def _payload(self, block: int) -> memoryview:
        payload = self._kv.block_memory(block)
        assert payload is not None
        return payload
