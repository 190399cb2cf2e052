"""One step's requests as one flattened sequence, with everything that attention needs.

All index tensors are made once per step and shared by every layer. Tokens of a request are
contiguous; requests follow one another in plan order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from reprise_worker.request_state import Ids, RequestState


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [num_computed, num_computed + num_new) of a request, at rows [start, start + num_new)."""

    start: int
    num_computed: int
    num_new: int
    tables: tuple[Ids, ...]
    """Per group the blocks that hold tokens [0, num_computed + num_new); of those before a window, any."""

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
    blocks: torch.Tensor | None  # (1, num_blocks), or None: attends to its own tokens only
    visible: torch.Tensor | None  # (1, 1, num_new, tokens of the blocks), bool, or None: plain causal


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
    start = 0
    for item in items:
        context = item.num_computed + item.num_new
        tables = tuple(table.view[: -(-context // block_size)] for table in item.state.tables)
        where = np.arange(item.num_computed, context)
        token_ids.append(item.state.tokens.view[item.num_computed : context])
        positions.append(where)
        for slots, table in zip(slot_blocks, tables, strict=True):
            slots.append(table[where // block_size])
        segments.append(Segment(start, item.num_computed, item.num_new, tables))
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
        prompt_rows=_tensor(np.array(prompt_rows, dtype=np.int64), device),
        segments=tuple(segments),
        block_size=block_size,
        device=device,
    )


def _tensor(ids: Ids, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(ids)).to(device)


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
    decode = tuple(_decode_group(groups[size], batch, group_id, window_tokens) for size in sorted(groups))
    return AttentionPlan(decode, tuple(prefill))


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
    newest = np.array([segment.num_computed for segment in segments])[:, None]
    position = np.array(firsts)[:, None] * batch.block_size + np.arange(width * batch.block_size)
    visible = _visible(position, newest, window_tokens)
    rows = np.array([segment.start for segment in segments])
    return DecodeGroup(
        rows=_tensor(rows, batch.device),
        blocks=_tensor(blocks, batch.device)[:, None],
        visible=torch.from_numpy(visible).to(batch.device)[:, None, None],
    )


def _prefill(segment: Segment, batch: Batch, group_id: int, window_tokens: int | None) -> PrefillSegment:
    stop = segment.start + segment.num_new
    unbounded = window_tokens is None or segment.context <= window_tokens
    if segment.num_computed == 0 and unbounded:
        return PrefillSegment(segment.start, stop, None, None)
    first = _first_block(segment, window_tokens, batch.block_size)
    newest = np.arange(segment.num_computed, segment.context)[:, None]
    visible = _visible(np.arange(first * batch.block_size, segment.context), newest, window_tokens)
    blocks = segment.tables[group_id][first:]
    return PrefillSegment(
        start=segment.start,
        stop=stop,
        blocks=_tensor(blocks, batch.device)[None] if segment.num_computed else None,
        visible=torch.from_numpy(visible).to(batch.device)[None, None],
    )


def _visible(
    position: Ids, newest: Ids, window_tokens: int | None
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which positions a token at `newest` sees: up to itself, and within the window."""
    visible = position <= newest
    if window_tokens is not None:
        visible &= position > newest - window_tokens
    return np.asarray(visible)
