"""Paged attention, as transformers' attention interface calls it.

`paged_attention` is registered under IMPLEMENTATION. No mask function is registered under that
name, so transformers builds no mask. The step's `PagedStep` reaches the function as a keyword
argument of the model's call: there is no global state.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from reprise_worker.batch import Batch, DecodeGroup, PrefillSegment
from reprise_worker.kv_cache import KvCache
from reprise_worker.layer_groups import LayerShape

IMPLEMENTATION = "reprise_paged"
STEP_ARGUMENT = "reprise_step"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What one layer asks of attention beside q, k and v."""

    layer: int
    scale: float | None
    window_tokens: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # (num_heads,), one more logit per head that takes weight


class AttentionBackend(Protocol):
    """The seam for faster kernels."""

    def attend(
        self,
        call: LayerCall,
        batch: Batch,
        kv: KvCache,
        query: torch.Tensor,  # (1, num_heads, num_tokens, key_dim)
        key: torch.Tensor,  # (1, num_kv_heads, num_tokens, key_dim)
        value: torch.Tensor,  # (1, num_kv_heads, num_tokens, value_dim)
    ) -> torch.Tensor:
        """Writes all K and V of the step, then reads; returns (1, num_tokens, num_heads, value_dim)."""


@dataclass(slots=True)
class PagedStep:
    """One forward pass over the paged cache."""

    batch: Batch
    kv: KvCache
    backend: AttentionBackend


class ShapeProbe:
    """Stands in for `PagedStep` to learn each layer's K and V shape and window; gives zeros as attention."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}
        self.num_calls = 0


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    step = others.get(STEP_ARGUMENT)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if isinstance(step, ShapeProbe):
        step.num_calls += 1
        step.layers[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        step.windows[layer] = sliding_window
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3])), None
    assert isinstance(step, PagedStep), "the model does not hand the step to its attention"
    step.batch.num_attention_calls += 1
    call = LayerCall(layer, scaling, sliding_window, softcap, s_aux)
    return step.backend.attend(call, step.batch, step.kv, query, key, value), None


def register() -> None:
    AttentionInterface.register(IMPLEMENTATION, paged_attention)


class TorchAttention:
    """Gathers blocks and calls torch's own attention: correct on every device, the reference."""

    def attend(
        self,
        call: LayerCall,
        batch: Batch,
        kv: KvCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        keys, values = kv.keys[call.layer], kv.values[call.layer]
        group_id = kv.group_of[call.layer]
        slot_blocks = batch.slot_blocks[group_id]
        keys[slot_blocks, :, batch.slot_offsets] = key[0].transpose(0, 1)
        values[slot_blocks, :, batch.slot_offsets] = value[0].transpose(0, 1)
        plan = batch.plan(call.window_tokens, group_id=group_id)
        out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))
        for group in plan.decode:
            out[0, group.rows] = _decode(call, group, query, keys, values)
        for segment in plan.prefill:
            rows = slice(segment.start, segment.stop)
            own = (query[:, :, rows], key[:, :, rows], value[:, :, rows])
            out[0, rows] = _prefill(call, segment, *own, keys, values)
        return out


def _decode(
    call: LayerCall, group: DecodeGroup, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """(group, num_heads, value_dim)"""
    own = query[0, :, group.rows].transpose(0, 1)[:, :, None]
    context = (_gather(keys, group.blocks), _gather(values, group.blocks))
    return _attend(call, own, *context, visible=group.visible)[:, :, 0]


def _prefill(
    call: LayerCall,
    segment: PrefillSegment,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """(num_new, num_heads, value_dim)"""
    if segment.blocks is not None:
        assert segment.visible is not None
        context = segment.visible.shape[-1]
        blocks = segment.blocks[:, None]
        key, value = _gather(keys, blocks)[:, :, :context], _gather(values, blocks)[:, :, :context]
    return _attend(call, query, key, value, visible=segment.visible)[0].transpose(0, 1)


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Blocks (group, 1, n) of a layer as (group, num_kv_heads, n * block_size, dim), one copy."""
    heads = torch.arange(cache.shape[1], device=cache.device)[None, :, None]
    return cache[blocks, heads].flatten(2, 3)


def _attend(
    call: LayerCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    visible: torch.Tensor | None,
) -> torch.Tensor:
    """(group, num_heads, num_new, value_dim); `visible` None: plain causal over equal lengths."""
    grouped = query.shape[1] != key.shape[1]
    if call.softcap is not None or call.sinks is not None:
        return _attend_by_hand(call, query, key, value, visible)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=visible is None, scale=call.scale, enable_gqa=grouped
    )


def _attend_by_hand(
    call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None
) -> torch.Tensor:
    """For what torch's attention has no argument for: capped logits and sinks."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = (query @ key.transpose(2, 3)).float() * scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if visible is None:
        length = query.shape[2]
        visible = torch.ones((length, length), dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~visible, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.float().reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return weights.to(value.dtype) @ value
