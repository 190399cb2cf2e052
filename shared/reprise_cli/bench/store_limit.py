"""What no load from the host tier can beat, for `reprise bench store`.

A load has its caller's thread wake another, which copies each block out of shared memory into the cache and
checks it. `BareLoads` does this and nothing else.
"""

import os
import threading
import time

from reprise_cli.bench.store_blocks import block_hash, keyspace_of
from reprise_runtime.shared_memory import make_memory
from reprise_wire.block_codec import HEADER_NBYTES, encode_header
from reprise_worker.block_fills import BlockFills, Target
from reprise_worker.kv_cache import KvCache
from reprise_worker.store_wire import StoreWire

PAGE_NBYTES = 4096


class BareLoads:
    def __init__(self, kv: KvCache, num_blocks: int) -> None:
        """Takes the values from the cache's first blocks, and loads into them."""
        wire = StoreWire(keyspace_of(kv.block_nbytes), 0, kv.block_nbytes)
        format = kv.block_format(wire.fingerprints[0])
        self._fills = BlockFills(kv, [format], None)
        nbytes = HEADER_NBYTES + kv.block_nbytes
        stride = nbytes + PAGE_NBYTES
        self._memory = make_memory("bench", num_blocks * stride)
        self._targets = [
            Target(block * stride, nbytes, block, block_hash(block)) for block in range(num_blocks)
        ]
        for target in self._targets:
            payload = kv.block_memory(target.block_id)
            assert payload is not None
            header = encode_header(payload, block_hash=target.block_hash, format=format)
            os.pwritev(self._memory.fd, [header, payload], target.offset)
        self._wake_read, self._wake_write = os.pipe()
        self._loaded = threading.Event()
        self._num_blocks = 0
        self._wrong: list[str] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def load(self, num_blocks: int) -> float:
        """Seconds until every block is in the cache."""
        self._num_blocks = num_blocks
        self._loaded.clear()
        start_s = time.perf_counter()
        os.write(self._wake_write, b"\0")
        self._loaded.wait()
        seconds = time.perf_counter() - start_s
        assert not any(self._wrong)
        return seconds

    def close(self) -> None:
        os.close(self._wake_write)
        self._thread.join()
        os.close(self._wake_read)

    def _serve(self) -> None:
        while os.read(self._wake_read, 1):
            targets = self._targets[: self._num_blocks]
            self._wrong = self._fills.fill(b"", targets, adapter_id=0, memory=self._memory)
            self._loaded.set()
