"""A worker's side of the block transfers without a model, for `reprise bench store`.

    python -m reprise_cli.bench.store_driver ENDPOINT true|false

The worker's own cache, transfers and link. One JSON command per line in, one answer per line out:
["make", block bytes, blocks], ["save" or "load", number of the first hash, blocks, generation], ["limit",
blocks]. The answer is the seconds from the step thread's call until every block was answered for.
"""

import json
import os
import sys
import threading
import time

import torch
import zmq
from prometheus_client import CollectorRegistry

from reprise_cli.bench.store_blocks import BLOCK_TOKENS, block_hash, keyspace_of, layers_of
from reprise_cli.bench.store_limit import BareLoads
from reprise_core.ids import GroupId
from reprise_core.steps import BlockLoad, BlockSave, TransferReport, pack_ids
from reprise_runtime.logs import configure_logs
from reprise_worker.adapters.store_link import StoreLink
from reprise_worker.kv_cache import KvCache
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.settings import WorkerSettings
from reprise_worker.transfer import TransferLimits, Transfers

SESSION = b"bench store sess"
STAGING_BYTES = 320 * 1024 * 1024
_DEFAULTS = WorkerSettings.model_fields


class Driver:
    def __init__(self, endpoint: str, block_nbytes: int, num_blocks: int, *, shared_memory: bool) -> None:
        metrics = WorkerMetrics(CollectorRegistry())
        self._block_nbytes = block_nbytes
        kv = KvCache(
            layers_of(block_nbytes),
            num_blocks=num_blocks,
            block_size=BLOCK_TOKENS,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for view in (*kv.keys, *kv.values):
            view.uniform_()
        self._transfers = Transfers(
            kv,
            keyspace=keyspace_of(block_nbytes),
            rank=0,
            limits=TransferLimits(
                staging_bytes=STAGING_BYTES,
                max_saves_in_flight=_DEFAULTS["max_saves_in_flight"].default,
                max_pending_loads=_DEFAULTS["max_pending_loads"].default,
                max_load_bytes_in_flight=_DEFAULTS["max_load_bytes_in_flight"].default,
                load_timeout_s=60.0,
                save_timeout_s=60.0,
            ),
            metrics=metrics,
            report=self._reported,
            shared_memory=shared_memory,
        )
        self._loaded, self._saved = threading.Event(), threading.Event()
        self._failed = ""
        self._num_to_save = self._num_saved_bytes = 0
        self._transfers.begin_session(SESSION)
        self._link = StoreLink(
            zmq.Context.instance(),
            endpoint,
            self._transfers,
            block_nbytes=kv.block_nbytes,
            shared_memory=shared_memory,
            metrics=metrics,
            on_fatal=_end,
        )
        self._link.start()
        self._bare = BareLoads(kv, num_blocks)

    def close(self) -> None:
        self._bare.close()
        self._link.stop()

    def limit(self, num_blocks: int) -> float:
        """What a load from host memory cannot beat."""
        return self._bare.load(num_blocks)

    def save(self, first: int, num_blocks: int, generation: int) -> float:
        """Until the store has answered for every block; raises when it did not take one."""
        saves = [
            BlockSave(GroupId(0), number, block_hash(first + number), generation)
            for number in range(num_blocks)
        ]
        self._num_to_save, self._num_saved_bytes = num_blocks, 0
        self._saved.clear()
        start_s = time.perf_counter()
        if self._transfers.save(saves):
            raise RuntimeError("the staging buffer is too small for the batch")
        self._saved.wait()
        seconds = time.perf_counter() - start_s
        if not self._num_saved_bytes >= num_blocks * self._block_nbytes:
            raise RuntimeError("the store did not take a block")
        return seconds

    def load(self, first: int, num_blocks: int, generation: int) -> float:
        hashes = tuple(block_hash(first + number) for number in range(num_blocks))
        load = BlockLoad(1, 0, pack_ids(range(num_blocks)), hashes, generation)
        self._loaded.clear()
        start_s = time.perf_counter()
        self._transfers.load([load])
        self._loaded.wait()
        seconds = time.perf_counter() - start_s
        if self._failed:
            raise RuntimeError(f"a load failed: {self._failed}")
        return seconds

    def _reported(self, session: bytes, report: TransferReport) -> None:
        for load in report.loads:
            self._failed = load.reason
            self._loaded.set()
        for saved in report.saved:
            self._num_to_save -= saved.num_blocks
            self._num_saved_bytes += saved.num_bytes
            if not self._num_to_save:
                self._saved.set()


def _end(error: BaseException) -> None:
    """From the link's thread: the bench finds the pipe closed."""
    print(f"the store link ended: {error!r}", file=sys.stderr, flush=True)
    os._exit(1)


def main() -> None:
    configure_logs("bench", level="warning", log_format="console")
    endpoint, shared_memory = sys.argv[1], sys.argv[2] == "true"
    driver: Driver | None = None
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answer = 0.0
        if name == "make":
            if driver is not None:
                driver.close()
            driver = Driver(endpoint, *arguments, shared_memory=shared_memory)
        else:
            answer = getattr(driver, name)(*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
