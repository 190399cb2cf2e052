"""A worker's transfers and link to the store in this process, without a model."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import zmq
from prometheus_client import CollectorRegistry

from reprise_core.ids import BlockHash, GroupId
from reprise_core.steps import BlockLoad, BlockSave, LoadReport, TransferReport, pack_ids
from reprise_wire.block_transfer import Keyspace
from reprise_worker.adapters.store_link import StoreLink
from reprise_worker.kv_cache import KvCache
from reprise_worker.layer_groups import LayerShape
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.transfer import TransferLimits, Transfers

SESSION = b"s" * 16


def random_cache(num_blocks: int, device: torch.device, dtype: torch.dtype = torch.float32) -> KvCache:
    """Random numbers in blocks of 8 KiB (4 KiB with 16 bits)."""
    kv = KvCache([LayerShape(2, 32, 32)] * 4, num_blocks=num_blocks, block_size=4, dtype=dtype, device=device)
    for view in (*kv.keys, *kv.values):
        view.uniform_()
    return kv


class LinkedWorker:
    """Without a cache of the caller's: `random_cache`, on a CPU."""

    def __init__(
        self,
        endpoint: str,
        keyspace: Keyspace,
        *,
        num_blocks: int = 64,
        shared_memory: bool = True,
        fp8: bool = False,
        kv: KvCache | None = None,
    ) -> None:
        self._registry = CollectorRegistry()
        metrics = WorkerMetrics(self._registry)
        self.kv = kv or random_cache(num_blocks, torch.device("cpu"))
        self._arrived = threading.Condition()
        self._reports: list[LoadReport] = []
        self.errors: list[BaseException] = []
        self.transfers = Transfers(
            self.kv,
            keyspace=keyspace,
            rank=0,
            limits=TransferLimits(
                staging_bytes=1 << 20,
                max_saves_in_flight=32,
                max_pending_loads=64,
                max_load_bytes_in_flight=64 * 1024 * 1024,
                load_timeout_s=20.0,
                save_timeout_s=20.0,
            ),
            metrics=metrics,
            report=self._reported,
            shared_memory=shared_memory,
            fp8=fp8,
        )
        self.transfers.begin_session(SESSION)
        self.link = StoreLink(
            zmq.Context.instance(),
            endpoint,
            self.transfers,
            block_nbytes=self.kv.block_nbytes,
            shared_memory=shared_memory,
            metrics=metrics,
            on_fatal=self.errors.append,
        )

    def save(self, blocks: Sequence[int], hashes: Sequence[BlockHash], generation: int) -> int:
        return self.transfers.save(
            [
                BlockSave(GroupId(0), block, digest, generation)
                for block, digest in zip(blocks, hashes, strict=True)
            ]
        )

    def load(self, blocks: Sequence[int], hashes: Sequence[BlockHash], generation: int) -> LoadReport:
        """Waits for the report."""
        with self._arrived:
            self._reports.clear()
            self.transfers.load([BlockLoad(1, 0, pack_ids(blocks), tuple(hashes), generation)])
            assert self._arrived.wait_for(lambda: self._reports or self.errors, timeout=30)
            return self._reports[0]

    def content(self, block: int) -> torch.Tensor:
        out = torch.empty(self.kv.block_nbytes, dtype=torch.uint8)
        self.kv.export_block(block, out)
        return out

    def metric(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(f"reprise_worker_{name}", labels) or 0.0

    def _reported(self, session: bytes, report: TransferReport) -> None:
        with self._arrived:
            self._reports += report.loads
            self._arrived.notify_all()


@contextmanager
def linked_worker(endpoint: str, keyspace: Keyspace, **how: Any) -> Iterator[LinkedWorker]:
    """`how`: `LinkedWorker`'s other arguments."""
    worker = LinkedWorker(endpoint, keyspace, **how)
    worker.link.start()
    try:
        yield worker
        assert not worker.errors
    finally:
        worker.link.stop()
