"""A worker without a model: it executes plans on a KV cache whose slots remember what they hold.

Slot content is a number that stands for the whole token prefix up to that slot. Computing a token
checks that the slot before holds its prefix, so a wrong block table, a block that was handed out too
early, or a hit on a block that was never filled is caught at the step where it happens. The next
token is a function of the prefix, so the right output of a request is known without a scheduler.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from reprise_core.steps import BlockLoad, BlockSave, LoadReport, StepPlan, StepResult, pack_ids, unpack_ids

EMPTY_PREFIX = 1
VOCAB = 50


def extend_prefix(prefix: int, token_id: int) -> int:
    mixed = (prefix * 6364136223846793005 + token_id * 2862933555777941757 + 1442695040888963407) % 2**64
    return mixed ^ (mixed >> 29)


def next_token(prefix: int) -> int:
    return prefix % VOCAB


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy output of the simulated model."""
    prefix = EMPTY_PREFIX
    for token_id in prompt:
        prefix = extend_prefix(prefix, token_id)
    output = []
    for _ in range(num_tokens):
        output.append(next_token(prefix))
        prefix = extend_prefix(prefix, output[-1])
    return output


@dataclass
class _State:
    token_ids: list[int]
    table: list[int]


@dataclass
class SimStore:
    """Block hash -> slot contents."""

    blocks: dict[bytes, list[int]] = field(default_factory=dict)
    generation: int = 1


class SimWorker:
    def __init__(self, num_blocks: int, block_size: int, store: SimStore) -> None:
        self.block_size = block_size
        self.slots = [0] * (num_blocks * block_size)
        self.store = store
        self.requests: dict[int, _State] = {}
        self.loads: list[BlockLoad] = []
        self.max_step_tokens = 0

    def execute(self, plan: StepPlan) -> StepResult:
        for handle in plan.removed:
            self.requests.pop(handle, None)
        for save in plan.saves:
            self._save(save)
        for group_id, source, target in plan.copies:
            assert group_id == 0
            self.slots[self._block(target)] = self.slots[self._block(source)]
        for added in plan.added:
            assert added.handle not in self.requests
            self.requests[added.handle] = _State(unpack_ids(added.token_ids), unpack_ids(added.block_ids[0]))
        self.loads += plan.loads
        handles, tokens = [], []
        self.max_step_tokens = max(self.max_step_tokens, plan.num_tokens)
        # As in a model, every layer writes all K and V of the step before any is read.
        computed = [self._compute(item.handle, item) for item in plan.scheduled]
        for check in computed:
            check()
        for item in plan.scheduled:
            state = self.requests[item.handle]
            if item.sample:
                end = item.num_computed_tokens + item.num_new_tokens
                assert end == len(state.token_ids), (end, len(state.token_ids))
                token_id = next_token(self.slots[self._slot(state, end - 1)])
                state.token_ids.append(token_id)
                handles.append(item.handle)
                tokens.append(token_id)
        return StepResult(plan.step_id, pack_ids(handles), pack_ids(tokens), 0.0)

    def _compute(self, handle, item):
        state = self.requests[handle]
        for group in item.new_block_ids:
            state.table += unpack_ids(group)
        start, end = item.num_computed_tokens, item.num_computed_tokens + item.num_new_tokens
        assert item.num_new_tokens > 0
        assert end <= len(state.token_ids)
        prefix = EMPTY_PREFIX
        for token_id in state.token_ids[:start]:
            prefix = extend_prefix(prefix, token_id)
        before = prefix
        for position in range(start, end):
            prefix = extend_prefix(prefix, state.token_ids[position])
            self.slots[self._slot(state, position)] = prefix

        def check() -> None:
            if start:
                held = self.slots[self._slot(state, start - 1)]
                assert held == before, f"handle {handle}: wrong KV before position {start}"
            # Every earlier block, too: attention reads all of them.
            inner = EMPTY_PREFIX
            for position, token_id in enumerate(state.token_ids[:end]):
                inner = extend_prefix(inner, token_id)
                assert self.slots[self._slot(state, position)] == inner, (handle, position)

        return check

    def _slot(self, state: _State, position: int) -> int:
        block_id = state.table[position // self.block_size]
        assert block_id != 0, "the null block was handed out"
        return block_id * self.block_size + position % self.block_size

    def _block(self, block_id: int) -> slice:
        return slice(block_id * self.block_size, (block_id + 1) * self.block_size)

    def _save(self, save: BlockSave) -> None:
        if save.generation == self.store.generation:
            self.store.blocks[save.block_hash] = self.slots[self._block(save.block_id)]

    def end_load(self, load: BlockLoad, fail) -> LoadReport:
        """`fail()` decides per block; a block that the store does not have fails too."""
        failed = []
        for block_id, block_hash in zip(unpack_ids(load.block_ids), load.block_hashes, strict=True):
            content = self.store.blocks.get(block_hash)
            if content is None or load.generation != self.store.generation or fail():
                self.slots[self._block(block_id)] = [-1] * self.block_size
                failed.append(block_id)
            else:
                self.slots[self._block(block_id)] = content
        self.loads.remove(load)
        return LoadReport(load.handle, load.group_id, pack_ids(failed), "missing" if failed else "")
