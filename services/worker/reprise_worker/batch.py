"""One step's requests as one flattened sequence, with everything that attention needs.

All index tensors are made once per step and shared by every layer. Tokens of a request are
contiguous; requests follow one another in plan order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from reprise_worker.request_state import Ids, RequestState

MAX_GROUP_TOKENS = 65_536
"""Limit on the contexts of a decode group, if it is not one alone: attention copies their K and V."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [num_computed, num_computed + num_new) of a request, at rows [start, start + num_new)."""

    start: int
    num_computed: int
    num_new: int
    tables: tuple[Ids, ...]
    """Per group the blocks that hold tokens [0, num_computed + num_new); of those before a window, any."""
    adapter_id: int = 0

    @property
    def context(self) -> int:
        return self.num_computed + self.num_new


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Segments of one token each whose contexts have about the same length."""

    rows: torch.Tensor  # (group,), rows of the flattened batch
    blocks: torch.Tensor  # (group, 1, num_blocks), padded with the null block
    visible: torch.Tensor  # (group, 1, 1, num_blocks * block_size), bool


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """A segment of several tokens."""

    start: int
    stop: int
    num_context: int  # tokens that it reads, its own at the end
    blocks: torch.Tensor | None  # (1, num_blocks), or None: attends to its own tokens only
    visible: torch.Tensor | None  # (1, 1, num_new, num_context), bool; None: causal, its own being last


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What layers with one window read."""

    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillSegment, ...]


@dataclass(slots=True)
class Batch:
    """Invariant: rows of all segments are [0, num_tokens), without gaps."""

    token_ids: torch.Tensor  # (1, num_tokens)
    positions: torch.Tensor  # (1, num_tokens)
    slot_blocks: tuple[torch.Tensor, ...]  # per group (num_tokens,), where each token's K and V go
    slot_offsets: torch.Tensor  # (num_tokens,)
    sample_rows: torch.Tensor  # (num_sampled,), rows after which a token is drawn
    begun_blocks: torch.Tensor  # (num_begun,), blocks of which this step fills the first part only
    prompt_rows: torch.Tensor  # (num_prompt_rows,), rows whose logits tell of a prompt's next token
    segments: tuple[Segment, ...]
    block_size: int
    device: torch.device
    num_attention_calls: int = 0
    _plans: dict[tuple[int, int | None], AttentionPlan] = field(default_factory=dict)

    @property
    def logit_rows(self) -> torch.Tensor:
        """Rows whose logits are wanted: first those that draw, then the prompts'."""
        return torch.cat((self.sample_rows, self.prompt_rows)) if len(self.prompt_rows) else self.sample_rows

    def plan(self, window_tokens: int | None, *, group_id: int = 0) -> AttentionPlan:
        """The plan for a group's layers that see the last `window_tokens` tokens, None for all; made once."""
        plan = self._plans.get((group_id, window_tokens))
        if plan is None:
            plan = self._plans[group_id, window_tokens] = _make_plan(self, group_id, window_tokens)
        return plan


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """A request and the tokens of it to compute."""

    state: RequestState
    num_computed: int
    num_new: int
    sample: bool

    @property
    def num_prompt_rows(self) -> int:
        """Rows from the first whose next token is the prompt's; 0 unless the request wants to know of it."""
        if self.state.sampling.num_prompt_logprobs is None:
            return 0
        return max(0, min(self.num_new, self.state.num_prompt_tokens - 1 - self.num_computed))


def make_batch(items: Sequence[ScheduledTokens], *, block_size: int, device: torch.device) -> Batch:
    token_ids, positions = [], []
    slot_blocks: list[list[Ids]] = [[] for _ in items[0].state.tables]
    segments: list[Segment] = []
    sample_rows: list[int] = []
    prompt_rows: list[int] = []
    begun_blocks: list[int] = []
    start = 0
    for item in items:
        context = item.num_computed + item.num_new
        tables = tuple(table.view[: -(-context // block_size)] for table in item.state.tables)
        where = np.arange(item.num_computed, context)
        token_ids.append(item.state.tokens.view[item.num_computed : context])
        positions.append(where)
        newest, num_used = divmod(context, block_size)
        begins = num_used and item.num_computed <= newest * block_size
        for slots, table in zip(slot_blocks, tables, strict=True):
            slots.append(table[where // block_size])
            begun_blocks += [table[newest]] if begins else []
        segments.append(Segment(start, item.num_computed, item.num_new, tables, item.state.adapter_id))
        prompt_rows += range(start, start + item.num_prompt_rows)
        start += item.num_new
        if item.sample:
            sample_rows.append(start - 1)
    flat_positions = np.concatenate(positions)
    return Batch(
        token_ids=_tensor(np.concatenate(token_ids), device)[None],
        positions=_tensor(flat_positions, device)[None],
        slot_blocks=tuple(_tensor(np.concatenate(slots), device) for slots in slot_blocks),
        slot_offsets=_tensor(flat_positions % block_size, device),
        sample_rows=_tensor(np.array(sample_rows, dtype=np.int64), device),
        begun_blocks=_tensor(np.array(begun_blocks, dtype=np.int64), device),
        prompt_rows=_tensor(np.array(prompt_rows, dtype=np.int64), device),
        segments=tuple(segments),
        block_size=block_size,
        device=device,
    )


def _tensor(ids: Ids, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(ids))
    if device.type == "cuda":  # from pageable memory each copy would wait for the device
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def _make_plan(batch: Batch, group_id: int, window_tokens: int | None) -> AttentionPlan:
    groups: dict[int, list[Segment]] = {}
    prefill: list[PrefillSegment] = []
    for segment in batch.segments:
        if segment.num_new == 1:
            first = _first_block(segment, window_tokens, batch.block_size)
            num_blocks = len(segment.tables[group_id]) - first
            groups.setdefault(_rounded(num_blocks), []).append(segment)
        else:
            prefill.append(_prefill(segment, batch, group_id, window_tokens))
    decode = []
    for size in sorted(groups):
        at_once = max(1, MAX_GROUP_TOKENS // (size * batch.block_size))
        for first in range(0, len(groups[size]), at_once):
            part = groups[size][first : first + at_once]
            decode.append(_decode_group(part, batch, group_id, window_tokens))
    return AttentionPlan(tuple(decode), tuple(prefill))


def _rounded(num_blocks: int) -> int:
    """Rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: a group reads at most half as much again."""
    size = 1 << max(0, num_blocks - 1).bit_length()
    return size * 3 // 4 if size >= 4 and num_blocks <= size * 3 // 4 else size


def _first_block(segment: Segment, window_tokens: int | None, block_size: int) -> int:
    """The first block that the segment's first token can see."""
    if window_tokens is None:
        return 0
    return max(0, segment.num_computed - window_tokens + 1) // block_size


def _decode_group(
    segments: list[Segment], batch: Batch, group_id: int, window_tokens: int | None
) -> DecodeGroup:
    tables = [segment.tables[group_id] for segment in segments]
    firsts = [_first_block(segment, window_tokens, batch.block_size) for segment in segments]
    width = max(len(table) - first for table, first in zip(tables, firsts, strict=True))
    blocks = np.zeros((len(segments), width), dtype=np.int64)
    for row, (table, first) in enumerate(zip(tables, firsts, strict=True)):
        blocks[row, : len(table) - first] = table[first:]
    starts = [first * batch.block_size for first in firsts]
    newest = [segment.num_computed - start for segment, start in zip(segments, starts, strict=True)]
    rows = [segment.start for segment in segments]
    where = _tensor(np.array([rows, newest]), batch.device)
    position = torch.arange(width * batch.block_size, device=batch.device)
    return DecodeGroup(
        rows=where[0],
        blocks=_tensor(blocks, batch.device)[:, None],
        visible=_visible(position, where[1][:, None], window_tokens)[:, None, None],
    )


def _prefill(segment: Segment, batch: Batch, group_id: int, window_tokens: int | None) -> PrefillSegment:
    stop = segment.start + segment.num_new
    unbounded = window_tokens is None or segment.context <= window_tokens
    first = _first_block(segment, window_tokens, batch.block_size)
    start = first * batch.block_size
    blocks = _tensor(segment.tables[group_id][first:], batch.device)[None] if segment.num_computed else None
    # A GPU's kernels need no mask where all that is before is seen; a CPU's do if there is a context.
    plain = unbounded and (blocks is None or batch.device.type == "cuda")
    position = torch.arange(segment.context - start, device=batch.device)
    visible = None if plain else _visible(position, position[-segment.num_new :, None], window_tokens)
    return PrefillSegment(
        start=segment.start,
        stop=stop,
        num_context=segment.context - start,
        blocks=blocks,
        visible=None if visible is None else visible[None, None],
    )


def _visible(position: torch.Tensor, newest: torch.Tensor, window_tokens: int | None) -> torch.Tensor:
    """Which positions a token at `newest` sees: up to itself, and within the window."""
    visible = position <= newest
    if window_tokens is not None:
        visible &= position > newest - window_tokens
    return visible
