"""What a worker says of the model it holds and of the blocks it can keep."""

import msgspec

from reprise_core.extra_keys import LoraAdapter


class KvGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table."""

    kind: str
    """full_attention or sliding_window."""
    block_size: int
    num_layers: int
    window_tokens: int | None = None
    """Of sliding_window: a token reads itself and this many less one before it."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """The name that clients ask for."""
    path: str
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    """32 hexadecimal digits."""
    adapters: tuple[LoraAdapter, ...] = ()
    """Served beside the model, with their content digests; the one at index i has the id i + 1."""


class WorkerCapacity(msgspec.Struct, frozen=True, kw_only=True):
    num_blocks: int
    """Of the pool that all groups share, the null block included."""
    block_size: int
    block_nbytes: int
    """Bytes of one block over the layers of its group; the same in every group."""
    groups: tuple[KvGroup, ...]
    max_num_batched_tokens: int
    """The worker's own limit on tokens in one step; the scheduler's budget is cut to it."""
