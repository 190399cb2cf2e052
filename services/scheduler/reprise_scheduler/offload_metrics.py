"""The reference's metrics of blocks that go to and come from the store (`vllm:kv_offload_*`)."""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from reprise_core.steps import TransferMeasure, TransferReport
from reprise_scheduler.sched.scheduler import Scheduler

_SIZE_BYTES = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
_SYNC_S = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
_ASYNC_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)


class _Direction:
    """Loads, or stores."""

    def __init__(self, registry: CollectorRegistry, names: Mapping[str, str], word: str) -> None:
        prefix, labels = f"vllm:kv_offload_{word}_", tuple(names)
        self._bytes = Counter(
            prefix + "bytes", f"Bytes in {word}s that arrived", labels, registry=registry
        ).labels(**names)
        self._time = Counter(prefix + "time", f"Seconds in {word}s", labels, registry=registry).labels(
            **names
        )
        self._size = Histogram(
            prefix + "size", f"Bytes of one {word}", labels, buckets=_SIZE_BYTES, registry=registry
        ).labels(**names)

    def observe(self, measures: Sequence[TransferMeasure]) -> None:
        for measure in measures:
            self._bytes.inc(measure.num_bytes)
            self._time.inc(max(measure.seconds, 0.0))
            if measure.num_bytes:
                self._size.observe(measure.num_bytes)


class OffloadMetrics:
    def __init__(self, registry: CollectorRegistry, names: Mapping[str, str]) -> None:
        self._loads = _Direction(registry, names, "load")
        self._stores = _Direction(registry, names, "store")
        labels, prefix = tuple(names), "vllm:kv_offload_"

        def seconds(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(prefix + name, text, labels, buckets=buckets, registry=registry).labels(**names)

        def share(name: str, text: str) -> Gauge:
            return Gauge(prefix + name, text, labels, registry=registry).labels(**names)

        self.lookup_sync = seconds(
            "lookup_sync_delay_seconds", "Time that starting one look-up took of the engine's", _SYNC_S
        )
        self.lookup_async = seconds(
            "lookup_async_delay_seconds", "Time until a look-up was answered or given up", _ASYNC_S
        )
        self._usage = share("cpu_cache_usage_perc", "Share of the host tier in transfers, 0 to 1")
        self._write_usage = share("cpu_cache_write_usage_perc", "Share of the host tier in stores, 0 to 1")
        self._read_usage = share("cpu_cache_read_usage_perc", "Share of the host tier in loads, 0 to 1")
        self._block_nbytes = 0
        self._host_bytes = 0

    def set_sizes(self, block_nbytes: int, host_bytes: int) -> None:
        """`host_bytes` is the capacity of the host tier; 0 = there is none."""
        self._block_nbytes, self._host_bytes = block_nbytes, host_bytes

    def observe(self, report: TransferReport) -> None:
        self._loads.observe(report.loaded)
        self._stores.observe(report.saved)

    def refresh(self, scheduler: Scheduler) -> None:
        write = self._share(scheduler.connector.num_saves_in_flight)
        read = self._share(scheduler.gate.num_loading_blocks)
        self._write_usage.set(write)
        self._read_usage.set(read)
        self._usage.set(min(write + read, 1.0))

    def _share(self, num_blocks: int) -> float:
        if not self._host_bytes:
            return 0.0
        return min(num_blocks * self._block_nbytes / self._host_bytes, 1.0)
