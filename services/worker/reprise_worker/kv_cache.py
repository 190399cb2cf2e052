"""The paged KV tensors: one slab per block, and per-layer views into all slabs.

A block belongs to one group of layers at a time. A slab holds, for each layer of the group, K as [kv_head,
token, key_dim] and then V as [kv_head, token, value_dim], contiguous. So one block moves to or from the
store as one run of bytes, and the inner order is what decode kernels like. K and V dimensions may differ,
also between layers.

Memory is zeroed, and so is a block that a step begins and does not fill: a masked position contributes weight
0, and 0 times a NaN that an earlier request or a failed load has left there would be NaN.
"""

import threading
from collections.abc import Sequence

import numpy as np
import torch

from reprise_wire.block_codec import BlockFormat
from reprise_worker.layer_groups import LayerGroup, LayerShape, group_layers

LAYOUT_VERSION = 1


def block_nbytes(
    layers: Sequence[LayerShape], groups: Sequence[LayerGroup], block_size: int, dtype: torch.dtype
) -> int:
    """Bytes of a block, whichever group has it."""
    return sum(layer.numel(block_size) for layer in _places(layers, groups)) * dtype.itemsize


def _places(layers: Sequence[LayerShape], groups: Sequence[LayerGroup]) -> tuple[LayerShape, ...]:
    """What lies in a block: the layers of the largest group, whose shapes are those of the others'."""
    largest = max(groups, key=lambda group: len(group.layers))
    return tuple(layers[layer] for layer in largest.layers)


class KvCache:
    """`keys[i]` and `values[i]`: views (num_blocks, num_kv_heads, block_size, dim) of layer i, which mean
    something in blocks of its own group, `group_of[i]`."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        groups: Sequence[LayerGroup] = (),
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`groups` empty = one of all layers."""
        self.groups = tuple(groups) or group_layers(layers, [None] * len(layers))
        self.places = _places(layers, self.groups)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_nbytes = block_nbytes(layers, self.groups, block_size, dtype)
        numel = self.block_nbytes // dtype.itemsize
        self._slabs = _zeros((num_blocks, numel), dtype, device)
        self.dtype = dtype
        self._bytes = self._slabs.view(torch.uint8)
        self._host_bytes = self._bytes.numpy() if device.type == "cpu" else None
        # Loads run beside the step, on a stream of their own, by way of one pinned block.
        self._load_stream: torch.cuda.Stream | None = None
        self._load_lock = threading.Lock()
        if device.type == "cuda":
            self._load_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._load_row = torch.empty(self.block_nbytes, dtype=torch.uint8, pin_memory=True)
        place_of = {
            layer: (number, place)
            for number, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }
        self.group_of = [place_of[layer][0] for layer in range(len(layers))]
        views = self._views(numel)
        self.keys = [views[place_of[layer][1]][0] for layer in range(len(layers))]
        self.values = [views[place_of[layer][1]][1] for layer in range(len(layers))]
        self.head_ids = torch.arange(max(place.num_kv_heads for place in self.places), device=device)
        """To gather blocks by; made once."""

    def _views(self, numel: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V at each place of all slabs."""
        views = []
        offset = 0
        for layer in self.places:
            pair = []
            for dim in (layer.key_dim, layer.value_dim):
                shape = (self.num_blocks, layer.num_kv_heads, self.block_size, dim)
                pair.append(self._slabs.as_strided(shape, (numel, self.block_size * dim, dim, 1), offset))
                offset += layer.num_kv_heads * self.block_size * dim
            views.append((pair[0], pair[1]))
        assert offset == numel
        return views

    def copy_block(self, source: int, target: int) -> None:
        self._slabs[target].copy_(self._slabs[source])

    def clear_blocks(self, blocks: torch.Tensor) -> None:
        """`blocks`: their ids, on the device."""
        if len(blocks):
            self._slabs.index_fill_(0, blocks, 0)

    def settle(self) -> None:
        """Waits for the steps and copies that this thread has given to the device. A load knows nothing of
        them: started before, it might be overwritten by one that is still queued."""
        if self._load_stream is not None:
            torch.cuda.current_stream(self._slabs.device).synchronize()

    def export_block(self, block_id: int, out: torch.Tensor, *, group_id: int = 0) -> None:
        """Copies a block's bytes into `out`, (block_nbytes,) uint8 in host memory; done on return. Places
        that the group has no layer for are zero, so that equal blocks are equal bytes."""
        if self._host_bytes is None:
            out.copy_(self._bytes[block_id])
        else:
            np.copyto(out.numpy(), self._host_bytes[block_id])
        unused = self.places[len(self.groups[group_id].layers) :]
        if unused:
            num_unused = sum(place.numel(self.block_size) for place in unused) * self.dtype.itemsize
            out[self.block_nbytes - num_unused :] = 0

    def block_format(self, fingerprint: bytes) -> BlockFormat:
        """How this cache's blocks are named in their headers."""
        layer = self.places[0] if len(set(self.places)) == 1 else LayerShape(0, 0, 0)
        return BlockFormat(
            fingerprint,
            dtype=str(self.dtype).removeprefix("torch."),
            num_layers=len(self.places),
            num_kv_heads=layer.num_kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            num_tokens=self.block_size,
            payload_nbytes=self.block_nbytes,
        )

    @property
    def host_memory(self) -> np.ndarray | None:
        """All of it, contiguous bytes; None on a device."""
        return self._host_bytes

    def block_memory(self, block_id: int) -> memoryview | None:
        """A block's bytes, to write in place under `import_block`'s conditions; None on a device."""
        return None if self._host_bytes is None else self._host_bytes[block_id].data

    @property
    def address(self) -> int:
        """Of block 0; the others follow."""
        return self._bytes.data_ptr()

    def import_block(self, block_id: int, payload: memoryview) -> None:
        """Fills a block with bytes that `export_block` gave; done on return. Any thread may call it,
        as long as no step uses the block: one that did is over, as `settle` says."""
        data = np.frombuffer(payload, dtype=np.uint8)
        assert data.nbytes == self.block_nbytes
        if self._load_stream is None:
            assert self._host_bytes is not None
            np.copyto(self._host_bytes[block_id], data)
            return
        with self._load_lock, torch.cuda.stream(self._load_stream):
            np.copyto(self._load_row.numpy(), data)
            self._bytes[block_id].copy_(self._load_row, non_blocking=True)
            self._load_stream.synchronize()


def _zeros(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU, numpy's zeros are pages that the system hands out at first touch: a large pool costs
    nothing until it is used, where torch's would be written at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros = np.zeros((shape[0], shape[1] * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(zeros).view(dtype)
