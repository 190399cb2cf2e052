"""Block values in 8 bits per element, for stores only: the cache itself keeps its dtype. Lossy.

A value is one float32 scale for K and one for V of each layer, then the elements as float8_e4m3fn in the
cache's order, each divided by its scale.
"""

from dataclasses import replace

import torch

from reprise_wire.block_codec import BlockFormat
from reprise_worker.kv_cache import KvCache

_LARGEST = 448.0
"""Of float8_e4m3fn; beyond it there is only NaN."""
_SMALLEST_SCALE = 1e-30


class Fp8Values:
    def __init__(self, kv: KvCache) -> None:
        self._dtype = kv.dtype
        self._parts = [
            layer.num_kv_heads * kv.block_size * dim
            for layer in kv.places
            for dim in (layer.key_dim, layer.value_dim)
        ]
        self._scales_nbytes = 4 * len(self._parts)
        self.nbytes = self._scales_nbytes + sum(self._parts)

    def format(self, plain: BlockFormat) -> BlockFormat:
        return replace(plain, dtype="float8_e4m3fn", payload_nbytes=self.nbytes)

    def encode(self, block: torch.Tensor) -> None:
        """`block`: a block's bytes in host memory; its first `nbytes` become the value."""
        scales, elements = [], []
        for part in torch.split(block.view(self._dtype), self._parts):
            scale = (part.abs().amax().float() / _LARGEST).clamp(min=_SMALLEST_SCALE)
            scales.append(scale)
            elements.append((part.float() / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn))
        block[: self._scales_nbytes] = torch.stack(scales).view(torch.uint8)
        block[self._scales_nbytes : self.nbytes] = torch.cat(elements).view(torch.uint8)

    def decode(self, payload: memoryview) -> memoryview:
        """The bytes of a block of the cache."""
        value = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        scales = value[: self._scales_nbytes].view(torch.float32)
        elements = torch.split(value[self._scales_nbytes :].view(torch.float8_e4m3fn), self._parts)
        parts = [(part.float() * scale).to(self._dtype) for part, scale in zip(elements, scales, strict=True)]
        return torch.cat(parts).view(torch.uint8).numpy().data
