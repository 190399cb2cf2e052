"""Blocks stored in 8 bits: how far they may be off, and that they meet no others."""

import pytest
import torch

from reprise_worker.fp8_values import Fp8Values
from reprise_worker.kv_cache import KvCache
from reprise_worker.layer_groups import LayerShape

LAYERS = (LayerShape(2, 8, 6), LayerShape(1, 4, 4))


def cache(dtype: torch.dtype) -> KvCache:
    kv = KvCache(LAYERS, num_blocks=4, block_size=4, dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    for number, view in enumerate((*kv.keys, *kv.values)):
        # Each part of a scale of its own, up to what float16 holds.
        view.copy_(torch.randn(view.shape, generator=generator) * 10.0 ** (number * 2 - 3))
    return kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_element_comes_back_within_a_sixteenth(dtype: torch.dtype) -> None:
    kv = cache(dtype)
    values = Fp8Values(kv)
    row = torch.empty(kv.block_nbytes, dtype=torch.uint8)
    kv.export_block(1, row)
    values.encode(row)
    kv.import_block(2, values.decode(memoryview(row[: values.nbytes].numpy().tobytes())))
    for view in (*kv.keys, *kv.values):
        before, after = view[1].float(), view[2].float()
        # Three bits of mantissa: half a step is a sixteenth; near zero a step is 2^-9 of the scale.
        allowed = before.abs() / 16 + before.abs().max() / 448 * 2**-9
        assert torch.all((before - after).abs() <= allowed * 1.05)
        assert not torch.equal(before, after)


def test_it_takes_a_byte_per_element_and_a_scale_per_part() -> None:
    kv = cache(torch.float32)
    assert Fp8Values(kv).nbytes == kv.block_nbytes // 4 + 4 * 4


def test_zeros_stay_zeros_and_the_largest_stays_finite() -> None:
    kv = cache(torch.float32)
    kv.keys[0][1].zero_()
    kv.values[0][1].fill_(3e38)
    values, row = Fp8Values(kv), torch.empty(kv.block_nbytes, dtype=torch.uint8)
    kv.export_block(1, row)
    values.encode(row)
    kv.import_block(2, values.decode(memoryview(row[: values.nbytes].numpy().tobytes())))
    assert not kv.keys[0][2].any()
    assert torch.allclose(kv.values[0][2], kv.values[0][1], rtol=1 / 16)


def test_the_header_says_so() -> None:
    kv = cache(torch.bfloat16)
    values = Fp8Values(kv)
    plain = kv.block_format(b"f" * 16)
    stored = values.format(plain)
    assert (plain.dtype, stored.dtype) == ("bfloat16", "float8_e4m3fn")
    assert stored.payload_nbytes == values.nbytes
    assert (stored.num_layers, stored.num_kv_heads) == (2, 0)  # the layers differ
