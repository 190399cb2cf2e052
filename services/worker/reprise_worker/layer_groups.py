"""Which layers share a block table.

A layer with a window reads the last tokens only, so the blocks before can serve others. Layers are grouped by
their window, in groups of as many layers as the smallest kind has; where a kind does not divide, its last
group has fewer, and that part of its blocks is unused. Layer i of every group lies at place i of a block, so
one pool of blocks serves all groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_GROUPS = 8
"""More tables cost more in every step than the blocks they save are worth: then all layers share one."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    num_kv_heads: int
    key_dim: int
    value_dim: int

    def numel(self, block_size: int) -> int:
        """Elements of one block of this layer, K and V."""
        return self.num_kv_heads * block_size * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    layers: tuple[int, ...]
    window_tokens: int | None = None
    """What the group's blocks are kept for; None = all tokens. Layers mask by their own windows."""


def group_layers(
    shapes: Sequence[LayerShape], windows: Sequence[int | None], *, hybrid: bool = True
) -> tuple[LayerGroup, ...]:
    """`windows`: of each layer, None = full attention. Full groups come first.

    One full group of all layers where `hybrid` is off, where layers differ in shape, or where a window is
    of one token.
    """
    together = (LayerGroup(tuple(range(len(shapes)))),)
    if not hybrid or any(window == 1 for window in windows):
        return together
    kinds = {window: [i for i, own in enumerate(windows) if own == window] for window in set(windows)}
    if len(kinds) == 1:
        return (LayerGroup(together[0].layers, windows[0]),)
    size = min(map(len, kinds.values()))
    groups = [
        LayerGroup(tuple(layers[start : start + size]), window)
        for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for start in range(0, len(layers), size)
    ]
    return tuple(groups) if len(groups) <= MAX_GROUPS and len(set(shapes)) == 1 else together
