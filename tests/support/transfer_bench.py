"""A worker's transfers without a socket, with a wire that remembers and a clock that stands still."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from prometheus_client import CollectorRegistry

from reprise_core.ids import BlockHash
from reprise_core.steps import BlockLoad, LoadReport, TransferMeasure, TransferReport, pack_ids
from reprise_wire.block_codec import encode_header
from reprise_wire.block_transfer import (
    TRANSFER_VERSION,
    Keyspace,
    TransferHeader,
    TransferKind,
    decode_transfer,
    encode_transfer,
)
from reprise_worker._accel import native_copy
from reprise_worker.kv_cache import KvCache
from reprise_worker.layer_groups import LayerShape
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.transfer import TransferLimits, Transfers

FINGERPRINT = "ab" * 16
SESSION = b"s" * 16
ADAPTERS = ("cd" * 16, "ef" * 16)
"""Content digests."""


COPIES = [
    pytest.param(False, id="python"),
    pytest.param(
        True, id="compiled", marks=pytest.mark.skipif(native_copy() is None, reason="no C compiler built it")
    ),
]


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


@dataclass
class Sent:
    header: TransferHeader
    values: list[bytes]


@dataclass
class Bench:
    """Transfers with a clock that stands still, a wire that remembers, and a list of reports."""

    limits: TransferLimits
    now_s: float = 0.0
    connected: bool = True
    fp8: bool = False
    compiled: bool = True
    """Blocks are copied by the accelerator, where it is built."""
    sent: list[Sent] = field(default_factory=list)
    reports: list[LoadReport] = field(default_factory=list)
    loaded: list[TransferMeasure] = field(default_factory=list)
    saved: list[TransferMeasure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        self.kv = KvCache(
            [LayerShape(2, 8, 8)],
            num_blocks=96,
            block_size=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.kv.keys[0].copy_(torch.randn(self.kv.keys[0].shape))
        self.transfers = Transfers(
            self.kv,
            keyspace=Keyspace("test", FINGERPRINT),
            rank=0,
            limits=self.limits,
            metrics=WorkerMetrics(self.registry),
            report=self.report,
            clock=lambda: self.now_s,
            fp8=self.fp8,
            adapters=ADAPTERS,
        )
        if not self.compiled:
            self.transfers._loads._fills._native = None
        self.transfers.begin_session(SESSION)

    def report(self, session: bytes, report: TransferReport) -> None:
        assert session == SESSION
        assert len(report.loads) == len(report.loaded)
        self.reports += report.loads
        self.loaded += report.loaded
        self.saved += report.saved

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        if self.connected:
            self.sent.append(Sent(decode_transfer(frames), [bytes(value) for value in frames[1:]]))
        return self.connected

    def pump(self) -> list[Sent]:
        self.sent = []
        self.transfers.pump(self.send)
        return self.sent

    def answer(self, sent: Sent, kind: TransferKind, values: Sequence[bytes] = (), **more: object) -> None:
        header = TransferHeader(TRANSFER_VERSION, kind, sent.header.transfer_id, **more)  # type: ignore[arg-type]
        frames = [encode_transfer(header), *values]
        self.transfers.receive(decode_transfer(frames), frames[1:])

    def value(self, block_id: int, block_hash: BlockHash, fingerprint: str = FINGERPRINT) -> bytes:
        """A block of the cache as another worker would have saved it."""
        out = torch.empty(self.kv.block_nbytes, dtype=torch.uint8)
        self.kv.export_block(block_id, out)
        payload = out.numpy().tobytes()
        wanted = self.kv.block_format(bytes.fromhex(fingerprint))
        return encode_header(payload, block_hash=block_hash, format=wanted) + payload

    def load(
        self, blocks: Sequence[int], hashes: Sequence[BlockHash], handle: int = 7, adapter_id: int = 0
    ) -> None:
        self.transfers.load([BlockLoad(handle, 0, pack_ids(blocks), tuple(hashes), 3, adapter_id)])

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"reprise_worker_{name}", labels) or 0.0


def limits(**changes: float) -> TransferLimits:
    standard = {
        "staging_bytes": 16 * 1024,
        "max_saves_in_flight": 4,
        "max_pending_loads": 3,
        "max_load_bytes_in_flight": 66 * 512,
        "load_timeout_s": 5.0,
        "save_timeout_s": 30.0,
    }
    return TransferLimits(**(standard | changes))  # type: ignore[arg-type]
