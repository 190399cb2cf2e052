"""Wires the worker: a step thread that owns the model, and a thread for each peer."""

import asyncio
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
import zmq
from prometheus_client import CollectorRegistry

from reprise_core.errors import InvalidInput
from reprise_core.extra_keys import LoraAdapter
from reprise_core.models import KvGroup, ModelInfo, WorkerCapacity
from reprise_runtime.collector import spare_long_lived
from reprise_runtime.health import Readiness
from reprise_runtime.logs import get_logger
from reprise_wire.block_transfer import Keyspace
from reprise_wire.step_codec import Hello
from reprise_worker.adapters.scheduler_link import CONDITION, SchedulerLink
from reprise_worker.adapters.store_link import StoreLink
from reprise_worker.attention import AttentionBackend, TorchAttention
from reprise_worker.fingerprint import model_fingerprint
from reprise_worker.kv_cache import KvCache
from reprise_worker.layer_groups import LayerGroup, group_layers
from reprise_worker.lora_folder import read_adapter
from reprise_worker.memory import pool_size
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.model import PagedModel, load_model
from reprise_worker.model_folder import check_model_folder, eos_token_ids
from reprise_worker.ports import Event, SchedulerConnection, Stop
from reprise_worker.prefault import prefault
from reprise_worker.runner import Runner
from reprise_worker.settings import WorkerSettings
from reprise_worker.step_loop import StepLoop
from reprise_worker.transfer import NoStore, TransferLimits, Transfers

log = get_logger()


class WorkerApp:
    def __init__(self, settings: WorkerSettings) -> None:
        self.registry = CollectorRegistry()
        self.readiness = Readiness("model", CONDITION)
        self._settings = settings
        self._metrics = WorkerMetrics(self.registry)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox: SimpleQueue[Event] = SimpleQueue()
        self._links: list[SchedulerConnection | StoreLink] = []
        self._failed: asyncio.Future[None]
        self._loop: asyncio.AbstractEventLoop
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._live, name="step", daemon=True)

    async def start(self) -> None:
        """The model is loaded in the background, so that a signal can end even that."""
        self._loop = asyncio.get_running_loop()
        self._failed = self._loop.create_future()
        self._thread.start()

    async def run(self) -> None:
        await self._failed

    async def stop(self) -> None:
        """Waits for the running step. While the model is still loading there is nothing to wait for."""
        self._stopping.set()
        if self._links:
            self._inbox.put(Stop())
            await asyncio.to_thread(self._thread.join)
            for link in self._links:
                await asyncio.to_thread(link.stop)

    def _fail(self, error: BaseException) -> None:
        def set_failed() -> None:
            if not self._failed.done():
                self._failed.set_exception(error)

        self._loop.call_soon_threadsafe(set_failed)

    def _live(self) -> None:
        """The step thread: everything of torch happens here, but for loads."""
        try:
            self._build().run()
        except BaseException as error:
            self._fail(error)

    def _build(self) -> StepLoop:
        settings = self._settings
        started_s = time.monotonic()
        folder = Path(settings.model_path)
        self.readiness.unmet("model", f"loading {folder}")
        check_model_folder(folder)
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        model = load_model(folder, device=_device(settings.device), dtype=settings.dtype)
        backend = TorchAttention()
        model.check(backend, block_size=settings.block_size)
        adapters = self._load_adapters(model, backend)
        groups = group_layers(model.layers, model.windows, hybrid=settings.hybrid_groups == "auto")
        info = _model_info(settings, folder, model, groups, adapters)
        kv = KvCache(
            model.layers,
            groups=groups,
            num_blocks=pool_size(settings, model, groups, backend),
            block_size=settings.block_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._metrics.kv_blocks.set(kv.num_blocks)
        self._metrics.kv_bytes.set(kv.num_blocks * kv.block_nbytes)
        log.info(
            "model loaded",
            architecture=info.architecture,
            device=str(model.device),
            dtype=info.dtype,
            num_blocks=kv.num_blocks,
            block_nbytes=kv.block_nbytes,
            seconds=round(time.monotonic() - started_s, 1),
        )
        scheduler = self.connect_scheduler(self._hello(info, kv), self._inbox)
        mover = self._mover(info, kv, scheduler)
        self._links.append(scheduler)
        spare_long_lived()  # what torch brought, above all; before somebody waits for a step
        for link in self._links:
            link.start()
        self.readiness.met("model")
        if kv.host_memory is not None and settings.prefault_kv:
            threading.Thread(
                target=self._prefault, args=(kv.host_memory,), name="prefault", daemon=True
            ).start()
        runner = Runner(model, kv, backend, mover)
        return StepLoop(self._inbox, runner, scheduler, mover, self._metrics)

    def _prefault(self, memory: np.ndarray) -> None:
        done = prefault(memory, stopping=self._stopping, on_progress=self._metrics.kv_prefaulted_bytes.set)
        if not done:
            log.info("the pages of the KV cache come as they are used: they cannot be had before")

    def _load_adapters(self, model: PagedModel, backend: AttentionBackend) -> tuple[LoraAdapter, ...]:
        """Raises BadModel. Their order is the setting's."""
        settings, adapters = self._settings, []
        for name, path in settings.adapters:
            weights = read_adapter(Path(path), max_rank=settings.max_lora_rank)
            adapter_id = model.add_adapter(weights, backend, block_size=settings.block_size)
            adapters.append(LoraAdapter(name, adapter_id, path, weights.digest))
            log.info("adapter loaded", adapter=name, path=path, rank=weights.rank, digest=weights.digest)
        self._metrics.adapters.set(len(adapters))
        return tuple(adapters)

    def _hello(self, info: ModelInfo, kv: KvCache) -> Hello:
        settings = self._settings
        groups = tuple(
            KvGroup(
                kind="sliding_window" if group.window_tokens else "full_attention",
                block_size=kv.block_size,
                num_layers=len(group.layers),
                window_tokens=group.window_tokens,
            )
            for group in kv.groups
        )
        return Hello(
            worker_id=secrets.token_hex(8),
            rank=settings.rank,
            world_size=settings.world_size,
            model=info,
            capacity=WorkerCapacity(
                num_blocks=kv.num_blocks,
                block_size=kv.block_size,
                block_nbytes=kv.block_nbytes,
                groups=groups,
                max_num_batched_tokens=settings.step_tokens(on_cuda=kv.keys[0].is_cuda),
            ),
        )

    def connect_scheduler(self, hello: Hello, inbox: SimpleQueue[Event]) -> SchedulerConnection:
        """Called in the step thread. The one-process engine connects another way."""
        return SchedulerLink(
            self._context,
            self._settings.scheduler_endpoint,
            hello=hello,
            inbox=inbox,
            heartbeat_interval_s=self._settings.heartbeat_interval_s,
            readiness=self.readiness,
            metrics=self._metrics,
            on_fatal=self._fail,
        )

    def _mover(self, info: ModelInfo, kv: KvCache, scheduler: SchedulerConnection) -> Transfers | NoStore:
        settings = self._settings
        if not settings.store_endpoint:
            return NoStore(self._metrics, scheduler.send_transfers)
        transfers = Transfers(
            kv,
            keyspace=Keyspace(settings.namespace, info.fingerprint, tp_size=settings.world_size),
            rank=settings.rank,
            adapters=[adapter.digest for adapter in info.adapters],
            limits=TransferLimits(
                staging_bytes=settings.save_staging_bytes,
                max_saves_in_flight=settings.max_saves_in_flight,
                max_pending_loads=settings.max_pending_loads,
                max_load_bytes_in_flight=settings.max_load_bytes_in_flight,
                load_timeout_s=settings.load_timeout_s,
                save_timeout_s=settings.save_timeout_s,
            ),
            metrics=self._metrics,
            report=scheduler.send_transfers,
            shared_memory=settings.shared_memory,
            fp8=settings.kv_offload_dtype == "fp8_e4m3",
        )
        link = StoreLink(
            self._context,
            settings.store_endpoint,
            transfers,
            block_nbytes=kv.block_nbytes,
            shared_memory=settings.shared_memory,
            metrics=self._metrics,
            on_fatal=self._fail,
        )
        self._links.append(link)
        return transfers


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("device", "cuda is wanted, but torch sees no CUDA device; allowed: auto, cpu")
    use_cuda = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    return torch.device("cuda", 0) if use_cuda else torch.device("cpu")


def _model_info(
    settings: WorkerSettings,
    folder: Path,
    model: PagedModel,
    groups: Sequence[LayerGroup],
    adapters: tuple[LoraAdapter, ...] = (),
) -> ModelInfo:
    longest = settings.max_model_len or model.max_model_len
    if not longest:
        raise InvalidInput("max_model_len", "the model names no limit; give the longest sequence in tokens")
    if model.max_model_len and longest > model.max_model_len:
        raise InvalidInput("max_model_len", f"{longest} exceeds the model's limit of {model.max_model_len}")
    name = settings.model_name or folder.resolve().name
    if any(adapter.name == name for adapter in adapters):
        raise InvalidInput("lora_modules", f"{name!r} is the model's own name, must be another")
    dtype = str(model.dtype).removeprefix("torch.")
    cache_dir = Path(settings.fingerprint_cache_dir) if settings.fingerprint_cache_dir else None
    return ModelInfo(
        name=name,
        path=str(folder.resolve()),
        architecture=model.architecture,
        dtype=dtype,
        max_model_len=longest,
        vocab_size=model.vocab_size,
        eos_token_ids=eos_token_ids(folder),
        fingerprint=model_fingerprint(
            folder,
            dtype=dtype,
            block_size=settings.block_size,
            architecture=model.architecture,
            cache_dir=cache_dir,
            offload_dtype=settings.kv_offload_dtype,
            groups=groups,
        ),
        adapters=adapters,
    )
