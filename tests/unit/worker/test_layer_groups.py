"""Which layers share a table and memory, and what a block's bytes are then."""

import pytest
import torch

from reprise_worker.kv_cache import KvCache, block_nbytes
from reprise_worker.layer_groups import MAX_GROUPS, LayerGroup, LayerShape, group_layers
from support.tiny_models import paged, small_config, small_model

SHAPE = LayerShape(2, 4, 4)


def grouped(*windows: int | None, **options: bool) -> list[tuple[list[int], int | None]]:
    groups = group_layers([SHAPE] * len(windows), windows, **options)
    return [(list(group.layers), group.window_tokens) for group in groups]


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ((None, None), [([0, 1], None)]),
        ((9, 9), [([0, 1], 9)]),
        ((9, None, 9, None), [([1, 3], None), ([0, 2], 9)]),
        # Five to one, as many models have it: groups of the smaller kind's size.
        ((9, 9, None, 9, 9, None), [([2, 5], None), ([0, 1], 9), ([3, 4], 9)]),
        ((9, None, 9, None, 9), [([1, 3], None), ([0, 2], 9), ([4], 9)]),
        ((9, 20, None), [([2], None), ([0], 9), ([1], 20)]),
        ((9, 20), [([0], 9), ([1], 20)]),
    ],
)
def test_layers_are_grouped_by_their_windows(
    windows: tuple[int | None, ...], groups: list[tuple[list[int], int | None]]
) -> None:
    assert grouped(*windows) == groups


def test_where_groups_do_not_fit_all_layers_share_one_table() -> None:
    together = [([0, 1, 2], None)]
    assert grouped(9, None, 9, hybrid=False) == together
    assert grouped(1, None, 9) == together
    shapes = (SHAPE, SHAPE, LayerShape(1, 4, 4))
    assert group_layers(shapes, (9, None, 9)) == (LayerGroup((0, 1, 2)),)
    many = (None, *[9] * MAX_GROUPS)
    assert len(grouped(*many[:-1])) == MAX_GROUPS
    assert grouped(*many) == [([*range(len(many))], None)]


def test_the_windows_of_a_model_are_found_by_running_it() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    hybrid = small_config("Qwen2", use_sliding_window=True, sliding_window=9, layer_types=types)
    assert paged(small_model(hybrid)).windows == (9, None, 9)
    assert paged(small_model(small_config("Mistral", sliding_window=9))).windows == (9, 9, 9)
    assert paged(small_model(small_config("Llama"))).windows == (None, None, None)


def cache_of(*windows: int | None) -> KvCache:
    shapes = [SHAPE] * len(windows)
    return KvCache(
        shapes,
        groups=group_layers(shapes, windows),
        num_blocks=6,
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_layers_at_one_place_of_their_groups_share_memory() -> None:
    kv = cache_of(9, None, 9, None)
    assert kv.group_of == [1, 0, 1, 0]
    assert kv.block_nbytes == 2 * SHAPE.numel(4) * 4
    assert kv.block_nbytes == block_nbytes([SHAPE] * 4, kv.groups, 4, torch.float32)
    kv.keys[0][3] = 5.0
    assert torch.equal(kv.keys[1][3], kv.keys[0][3])
    assert not kv.keys[2].any()
    assert not kv.values[0].any()
    assert kv.block_format(bytes(16)).num_layers == 2


def test_a_block_of_a_shorter_group_has_zeros_where_it_has_no_layer() -> None:
    """Else equal blocks of two engines would differ by what was there before."""
    kv = cache_of(9, None, 9, None, 9)
    for view in (*kv.keys, *kv.values):
        view.fill_(7.0)
    out = torch.empty(kv.block_nbytes, dtype=torch.uint8)
    elements = out.view(torch.float32)
    kv.export_block(2, out, group_id=1)
    assert elements.eq(7.0).all()
    kv.export_block(2, out, group_id=2)
    assert elements[: SHAPE.numel(4)].eq(7.0).all()
    assert elements[SHAPE.numel(4) :].eq(0.0).all()
