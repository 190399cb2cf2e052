"""The flattened batch: slots, positions, and what each token may see."""

from collections.abc import Sequence

import pytest
import torch

from reprise_worker import batch
from reprise_worker.batch import Batch, ScheduledTokens, make_batch
from reprise_worker.request_state import IdList, RequestState


def request(num_tokens: int, blocks: Sequence[int]) -> RequestState:
    return RequestState.scratch(tokens=IdList(range(100, 100 + num_tokens)), blocks=IdList(blocks))


def batch_of(*items: ScheduledTokens) -> Batch:
    return make_batch(items, block_size=4, device=torch.device("cpu"))


def test_slots_follow_the_block_tables() -> None:
    batch = batch_of(
        ScheduledTokens(request(7, [9, 2]), 2, 5, True),
        ScheduledTokens(request(9, [5, 1, 7]), 8, 1, True),
        ScheduledTokens(request(6, [3, 4]), 0, 3, False),
    )
    assert batch.token_ids[0].tolist() == [102, 103, 104, 105, 106, 108, 100, 101, 102]
    assert batch.positions[0].tolist() == [2, 3, 4, 5, 6, 8, 0, 1, 2]
    (slot_blocks,) = batch.slot_blocks
    assert slot_blocks.tolist() == [9, 9, 2, 2, 2, 7, 3, 3, 3]
    assert batch.slot_offsets.tolist() == [2, 3, 0, 1, 2, 0, 0, 1, 2]
    assert batch.sample_rows.tolist() == [4, 5]


def test_a_fresh_prompt_reads_no_blocks() -> None:
    (segment,) = batch_of(ScheduledTokens(request(6, [3, 4]), 0, 6, True)).plan(None).prefill
    assert (segment.start, segment.stop, segment.blocks, segment.visible) == (0, 6, None, None)


def test_a_continued_prompt_sees_its_context_causally() -> None:
    (segment,) = batch_of(ScheduledTokens(request(6, [3, 4]), 3, 3, True)).plan(None).prefill
    assert segment.blocks is not None
    assert segment.visible is not None
    assert segment.blocks.tolist() == [[3, 4]]
    assert segment.visible[0, 0].int().tolist() == [
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1],
    ]


def test_a_window_bounds_what_a_fresh_prompt_sees() -> None:
    batch = batch_of(ScheduledTokens(request(4, [3]), 0, 4, True))
    (segment,) = batch.plan(2).prefill
    assert segment.visible is not None
    assert segment.visible[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert batch.plan(4).prefill[0].visible is None  # as long as the window: plain causal


def test_decodes_of_like_length_share_a_group() -> None:
    lengths = [3, 5, 7, 9, 30, 31, 60]
    items = [
        ScheduledTokens(request(length, range(1, 2 + length // 4)), length - 1, 1, True) for length in lengths
    ]
    groups = batch_of(*items).plan(None).decode
    assert [group.rows.tolist() for group in groups] == [[0], [1, 2], [3], [4, 5], [6]]
    for group in groups:
        num_visible = group.visible[:, 0, 0].sum(dim=1).tolist()
        assert num_visible == [lengths[row] for row in group.rows.tolist()]
        padded = group.blocks.shape[-1] * 4
        assert all(padded <= max(8, 1.5 * length + 4) for length in num_visible)


def test_a_group_of_decodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_GROUP_TOKENS", 40)
    lengths = [30, 30, 7, 7, 7, 7, 7, 7, 60]
    items = [
        ScheduledTokens(request(length, range(1, 2 + length // 4)), length - 1, 1, True) for length in lengths
    ]
    groups = batch_of(*items).plan(None).decode
    assert [group.rows.tolist() for group in groups] == [[2, 3, 4, 5, 6], [7], [0], [1], [8]]


def test_padding_is_the_null_block_and_never_seen() -> None:
    items = [
        ScheduledTokens(request(length, [5, 6][: -(-length // 4)]), length - 1, 1, True) for length in (7, 8)
    ]
    items.append(ScheduledTokens(request(21, range(1, 7)), 20, 1, True))
    items.append(ScheduledTokens(request(17, range(11, 16)), 16, 1, True))
    narrow, wide = batch_of(*items).plan(None).decode
    assert narrow.blocks[:, 0].tolist() == [[5, 6], [5, 6]]
    assert wide.blocks[:, 0].tolist() == [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 0]]
    assert not wide.visible[1, 0, 0, 17:].any()


@pytest.mark.parametrize(("window", "first_block"), [(4, 2), (5, 1), (8, 1), (9, 0), (100, 0)])
def test_a_window_cuts_what_a_decode_reads(window: int, first_block: int) -> None:
    (group,) = batch_of(ScheduledTokens(request(12, [4, 5, 6]), 11, 1, True)).plan(window).decode
    assert group.blocks[0, 0].tolist() == [4, 5, 6][first_block:]
    positions = torch.arange(first_block * 4, 12)
    assert positions[group.visible[0, 0, 0]].tolist() == list(range(max(0, 12 - window), 12))


def test_id_lists_grow_and_keep_their_content() -> None:
    ids = IdList([1, 2])
    for start in range(0, 300, 3):
        ids.extend([start, start + 1, start + 2])
    assert len(ids) == 302
    assert ids.view.tolist() == [1, 2, *range(300)]
