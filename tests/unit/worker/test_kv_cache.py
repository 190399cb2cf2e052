"""The cache's layout, and blocks as bytes."""

import pytest
import torch

from reprise_worker.kv_cache import KvCache, block_nbytes
from reprise_worker.layer_groups import LayerShape

LAYERS = (LayerShape(2, 3, 5), LayerShape(1, 4, 4))


def cache(dtype: torch.dtype = torch.float32) -> KvCache:
    return KvCache(LAYERS, num_blocks=6, block_size=4, dtype=dtype, device=torch.device("cpu"))


def fill(kv: KvCache) -> None:
    for number, view in enumerate([*kv.keys, *kv.values]):
        view.copy_(torch.arange(view.numel()).reshape(view.shape) + 1000 * number)


def test_views_have_the_documented_shapes_and_start_as_zeros() -> None:
    kv = cache()
    assert [tuple(view.shape) for view in kv.keys] == [(6, 2, 4, 3), (6, 1, 4, 4)]
    assert [tuple(view.shape) for view in kv.values] == [(6, 2, 4, 5), (6, 1, 4, 4)]
    assert not any(view.any() for view in [*kv.keys, *kv.values])


def test_a_block_is_layer_by_layer_k_then_v() -> None:
    kv = cache()
    fill(kv)
    out = torch.empty(kv.block_nbytes, dtype=torch.uint8)
    kv.export_block(2, out)
    expected = torch.cat(
        [part[2].flatten() for pair in zip(kv.keys, kv.values, strict=True) for part in pair]
    )
    assert torch.equal(out.view(torch.float32), expected)
    assert kv.block_nbytes == block_nbytes(LAYERS, kv.groups, 4, torch.float32) == (2 * 8 + 8) * 4 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_comes_back_into_another_place(dtype: torch.dtype) -> None:
    kv = cache(dtype)
    fill(kv)
    out = torch.empty(kv.block_nbytes, dtype=torch.uint8)
    kv.export_block(3, out)
    before = kv.keys[0][4].clone()
    kv.import_block(5, memoryview(out.numpy().tobytes()))
    for view in [*kv.keys, *kv.values]:
        assert torch.equal(view[5], view[3])
    assert torch.equal(kv.keys[0][4], before)


def test_copying_a_block_copies_every_layer() -> None:
    kv = cache()
    fill(kv)
    kv.copy_block(1, 4)
    assert all(torch.equal(view[4], view[1]) for view in [*kv.keys, *kv.values])
