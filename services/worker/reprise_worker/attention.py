"""Paged attention, as transformers' attention interface calls it.

`paged_attention` is registered under IMPLEMENTATION. No mask function is registered under that
name, so transformers builds no mask. The step's `PagedStep` reaches the function as a keyword
argument of the model's call: there is no global state.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from reprise_worker.batch import Batch
from reprise_worker.kv_cache import KvCache
from reprise_worker.layer_groups import LayerShape

IMPLEMENTATION = "reprise_paged"
STEP_ARGUMENT = "reprise_step"
_SCORES_AT_ONCE = 1 << 26
"""Limit on the scores that are written out, in float32: 0.25 GB, and some copies."""


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
            own = query[0, :, group.rows].transpose(0, 1)[:, :, None]
            context = (_gather(kv, keys, group.blocks), _gather(kv, values, group.blocks))
            out[0, group.rows] = _attend(call, own, *context, visible=group.visible)[:, :, 0]
        for segment in plan.prefill:
            rows = slice(segment.start, segment.stop)
            if segment.blocks is None:
                context = (key[:, :, rows], value[:, :, rows])
            else:
                blocks, tokens = segment.blocks[:, None], slice(segment.num_context)
                context = (_gather(kv, keys, blocks)[:, :, tokens], _gather(kv, values, blocks)[:, :, tokens])
            out[0, rows] = _attend(call, query[:, :, rows], *context, visible=segment.visible)[0].transpose(
                0, 1
            )
        return out


def _gather(kv: KvCache, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Blocks (group, 1, n) of a layer as (group, num_kv_heads, n * block_size, dim), one copy."""
    heads = kv.head_ids[None, : cache.shape[1], None]
    return cache[blocks, heads].flatten(2, 3)


def _attend(
    call: LayerCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    visible: torch.Tensor | None,
) -> torch.Tensor:
    """(group, num_heads, num_new, value_dim); `visible` None: causal, the new tokens being the last."""
    if call.softcap is not None or call.sinks is not None:
        return _attend_by_hand(call, query, key, value, visible)
    num_heads, num_new = query.shape[1], query.shape[2]
    grouped = num_heads != key.shape[1]
    if num_new == 1 and grouped:
        # The heads that share K and V, as tokens of one head: all kernels take that, and read K and V once.
        folded = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=visible, scale=call.scale)
        return out.reshape(query.shape[0], num_heads, 1, -1)
    if grouped and query.is_cuda and (visible is not None or query.dtype == torch.float32):
        # The kernel that takes a mask or float32 wants as many heads; else torch would write all scores.
        key, value = _repeat_heads(key, num_heads), _repeat_heads(value, num_heads)
        grouped = False
    causal = visible is None and num_new == key.shape[2]
    mask = causal_lower_right(num_new, key.shape[2]) if visible is None and not causal else visible
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=call.scale, enable_gqa=grouped
    )


def _repeat_heads(heads: torch.Tensor, num_heads: int) -> torch.Tensor:
    return heads.repeat_interleave(num_heads // heads.shape[1], 1)


def _attend_by_hand(
    call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None
) -> torch.Tensor:
    """For what torch's attention has no argument for: capped logits and sinks. Some rows at a time."""
    num_heads, num_new = query.shape[1], query.shape[2]
    key, value = _repeat_heads(key, num_heads), _repeat_heads(value, num_heads)
    if visible is None:
        position = torch.arange(key.shape[2], device=query.device)
        visible = (position <= position[-num_new:, None])[None, None]
    at_once = max(1, _SCORES_AT_ONCE // (query.shape[0] * num_heads * key.shape[2]))
    parts = [
        _attend_rows(call, rows, key, value, seen)
        for rows, seen in zip(
            torch.split(query, at_once, dim=2), torch.split(visible, at_once, dim=2), strict=True
        )
    ]
    return torch.cat(parts, dim=2)


def _attend_rows(
    call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = (query @ key.transpose(2, 3)).float() * scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.float().reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return weights.to(value.dtype) @ value
