"""Every setting of the worker service."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from reprise_runtime.settings import ServiceSettings, settings_config
from reprise_worker.lora_modules import LoraModule, read_lora_modules

GIB = 1024**3
MIB = 1024**2


class WorkerSettings(ServiceSettings):
    """Read from the environment, prefix REPRISE_WORKER_. Remote code in model folders never runs."""

    service: ClassVar[str] = "worker"
    model_config = settings_config("worker") | {"protected_namespaces": ()}

    metrics_address: str = "127.0.0.1:9204"
    model_path: str
    """Folder with config.json, safetensors and tokenizer files; `reprise_worker.prepare` prints one."""
    model_name: str = ""
    """The name that clients ask for; empty: the folder's name."""
    scheduler_endpoint: str = "tcp://127.0.0.1:5760"
    store_endpoint: str = "tcp://127.0.0.1:5770"
    """Where block bytes go; empty: no store, saves are dropped and loads fail as unavailable."""
    shared_memory: bool = True
    """Block values go through shared memory where the store is on this machine and offers it."""
    kv_offload_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """How elements are stored outside of the cache. auto: as they are. fp8_e4m3: 8 bits and a scale per
    layer, which changes what is loaded again; such blocks have a model fingerprint of their own."""
    namespace: str = Field(default="reprise", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """First part of every external key."""
    rank: int = Field(default=0, ge=0)
    world_size: int = Field(default=1, ge=1)

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on a CPU, the checkpoint's own on CUDA."""
    lora_modules: str = ""
    """Adapters (folders in PEFT's format) by the names that clients ask for: NAME=PATH,NAME=PATH or a JSON
    list of objects with name and path. Name and path are part of the block hashes, as they stand here."""
    max_lora_rank: int = Field(default=16, ge=1)
    """Of any adapter."""
    max_model_len: int = Field(default=0, ge=0)
    """Longest sequence in tokens; 0: the model's own limit."""
    max_num_batched_tokens: int = Field(default=0, ge=0)
    """The worker's own limit on tokens in one step; 0: 8192 on CUDA, 512 on a CPU, where a longer step
    would keep the running requests waiting for seconds and be no faster per token."""
    num_threads: int = Field(default=0, ge=0)
    """Threads of torch; 0: torch's default."""
    gomp_spincount: int = Field(default=2000, ge=0)
    """How long OpenMP threads spin before they sleep; small where other processes share the cores."""

    block_size: int = Field(default=16, ge=1)
    hybrid_groups: Literal["auto", "off"] = "auto"
    """auto: layers with a window have block tables of their own, and keep only the blocks of their windows.
    off: all layers share one table, and those with a window mask. Blocks in the store are apart."""
    num_blocks: int = Field(default=0, ge=0)
    """Blocks of the pool, the null block included; 0: from the memory budget."""
    kv_memory_bytes: int = Field(default=0, ge=0)
    """Memory budget of the KV cache; 0: a quarter of the free memory, at most 4 GiB, on a CPU; on CUDA
    what `gpu_memory_utilization` of the device leaves beside weights and activations."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    prefault_kv: bool = True
    """On a CPU: takes the pool's pages in the background once the model is there; false: as they are used."""

    heartbeat_interval_s: float = Field(default=0.5, gt=0)
    """Until the scheduler names another one; also how often HELLO is repeated."""
    load_timeout_s: float = Field(default=5.0, gt=0)
    """A load that takes longer is reported as failed, and its tokens are computed."""
    save_timeout_s: float = Field(default=30.0, gt=0)
    """A save without an answer for so long is counted as failed."""
    save_staging_bytes: int = Field(default=256 * MIB, ge=1)
    """Host memory for blocks on their way to the store; a save that finds it full is dropped."""
    max_saves_in_flight: int = Field(default=32, ge=1)
    """Blocks sent to the store and not yet answered."""
    max_pending_loads: int = Field(default=1024, ge=1)
    """Loads started and not yet ended; further ones fail as unavailable."""
    max_load_bytes_in_flight: int = Field(default=32 * MIB, ge=1)
    """Block bytes asked from the store and not yet answered, over all loads; one block at least."""
    fingerprint_cache_dir: str = ""
    """Where the digest of the weights is kept when the model folder is read-only; empty: nowhere."""

    @model_validator(mode="after")
    def _check_lora_modules(self) -> "WorkerSettings":
        _ = self.adapters
        return self

    @property
    def adapters(self) -> tuple[LoraModule, ...]:
        """What `lora_modules` says."""
        return read_lora_modules(self.lora_modules)

    def step_tokens(self, *, on_cuda: bool) -> int:
        """Most tokens of one step."""
        return self.max_num_batched_tokens or (8192 if on_cuda else 512)
