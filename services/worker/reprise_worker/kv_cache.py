"""The paged KV tensors: one slab per block, and per-layer views into all slabs.

A slab holds, for each layer, K as [kv_head, token, key_dim] and then V as [kv_head, token,
value_dim], contiguous. So one block moves to or from the store as one run of bytes, and the inner
order is what decode kernels like. K and V dimensions may differ, also between layers.

Memory is zeroed: a masked position contributes weight 0, and 0 times a stray NaN would be NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class LayerShape:
    num_kv_heads: int
    key_dim: int
    value_dim: int

    def numel(self, block_size: int) -> int:
        """Elements of one block of this layer, K and V."""
        return self.num_kv_heads * block_size * (self.key_dim + self.value_dim)


def block_nbytes(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    return sum(layer.numel(block_size) for layer in layers) * dtype.itemsize


class KvCache:
    """`keys[i]` and `values[i]`: views (num_blocks, num_kv_heads, block_size, dim) of layer i."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_nbytes = block_nbytes(layers, block_size, dtype)
        numel = self.block_nbytes // dtype.itemsize
        self._slabs = _zeros((num_blocks, numel), dtype, device)
        self._bytes = self._slabs.view(torch.uint8)
        # Loads run beside the step, on a stream of their own.
        self._load_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._load_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        offset = 0
        for layer in layers:
            for dim, views in ((layer.key_dim, self.keys), (layer.value_dim, self.values)):
                shape = (num_blocks, layer.num_kv_heads, block_size, dim)
                strides = (numel, block_size * dim, dim, 1)
                views.append(self._slabs.as_strided(shape, strides, offset))
                offset += layer.num_kv_heads * block_size * dim
        assert offset == numel

    def copy_block(self, source: int, target: int) -> None:
        self._slabs[target].copy_(self._slabs[source])

    def export_block(self, block_id: int, out: torch.Tensor) -> None:
        """Copies a block's bytes into `out`, (block_nbytes,) uint8 in host memory; done on return."""
        out.copy_(self._bytes[block_id])

    def import_block(self, block_id: int, payload: memoryview) -> None:
        """Fills a block with bytes that `export_block` gave; done on return. Any thread may call it,
        as long as no step uses the block."""
        data = np.frombuffer(payload, dtype=np.uint8)
        assert data.nbytes == self.block_nbytes
        if self._load_stream is None:
            np.copyto(self._bytes[block_id].numpy(), data)
            return
        with torch.cuda.stream(self._load_stream):
            self._bytes[block_id].copy_(torch.from_numpy(data.copy()))
        self._load_stream.synchronize()


def _zeros(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU, numpy's zeros are pages that the system hands out at first touch: a large pool costs
    nothing until it is used, where torch's would be written at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros = np.zeros((shape[0], shape[1] * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(zeros).view(dtype)
