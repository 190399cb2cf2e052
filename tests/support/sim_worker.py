"""A worker without a model: it executes plans on a KV cache whose slots remember what they hold.

Slot content is a number that stands for the whole token prefix up to that slot. Computing a token
checks that the slot before holds its prefix, so a wrong block table, a block that was handed out too
early, or a hit on a block that was never filled is caught at the step where it happens. The next
token is a function of the prefix, so the right output of a request is known without a scheduler.

Each group has slots of its own content in the blocks of one pool. A windowed group is checked, and may be
null, as its window says; the token after is drawn from the first group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reprise_core.logprobs import TokenLogprobs
from reprise_core.steps import (
    BlockLoad,
    BlockSave,
    LoadReport,
    RequestLogprobs,
    ScheduledRequest,
    StepPlan,
    StepResult,
    WorkerSampling,
    pack_ids,
    unpack_ids,
)
from reprise_scheduler.kv_cache.config import GroupKind, GroupSpec
from reprise_scheduler.kv_cache.group import Group
from reprise_scheduler.sched.stored_blocks import StoredBlocks
from reprise_scheduler.store_lookup import find_stored
from support.logprob_rows import pack_row

EMPTY_PREFIX = 1
VOCAB = 50


def extend_prefix(prefix: int, token_id: int) -> int:
    mixed = (prefix * 6364136223846793005 + token_id * 2862933555777941757 + 1442695040888963407) % 2**64
    return mixed ^ (mixed >> 29)


def content_of(prefix: int, group_id: int) -> int:
    """What a slot of the group holds for a prefix; the first group's is the prefix itself."""
    return (prefix + group_id * 0x9E3779B97F4A7C15) % 2**64


def _first_read(group: GroupSpec, position: int) -> int:
    """The first position that the token at `position` attends to."""
    if group.kind is GroupKind.SLIDING:
        return max(0, position - (group.window or 0) + 1)
    if group.kind is GroupKind.CHUNKED:
        return position // (group.chunk or 1) * (group.chunk or 1)
    return 0


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


def logprob_row(prefix: int, token_id: int, num_top: int) -> bytes:
    """The simulated model's log-probability of a token after a prefix."""
    value = -float((prefix ^ token_id) % 4096)
    tops = range(num_top)
    return pack_row(TokenLogprobs(value, 1 + token_id, tuple(tops), tuple(value - top for top in tops)))


def expected_logprobs(token_ids: Sequence[int], first: int, num_top: int) -> bytes:
    """Rows of the tokens from index `first` on."""
    rows, prefix = b"", EMPTY_PREFIX
    for index, token_id in enumerate(token_ids):
        if index >= first:
            rows += logprob_row(prefix, token_id, num_top)
        prefix = extend_prefix(prefix, token_id)
    return rows


@dataclass
class _State:
    token_ids: list[int]
    tables: list[list[int]]
    num_prompt_tokens: int
    sampling: WorkerSampling


@dataclass
class SimStore:
    """Block hash -> slot contents. Blocks of the first group are named by their hash alone."""

    blocks: dict[bytes, list[int]] = field(default_factory=dict)
    generation: int = 1

    def stored(
        self, groups: Sequence[Group], hashes: Sequence[bytes], tier: Callable[[], str] = lambda: "external"
    ) -> StoredBlocks:
        """What a scheduler that asks now finds; `tier` is asked per block."""
        looking = find_stored(_Asked(self, tier), "", groups, hashes)
        try:
            looking.send(None)
        except StopIteration as end:
            return end.value[0]
        raise AssertionError("it has nothing to wait for")


def store_name(group_id: int, block_hash: bytes) -> bytes:
    return block_hash + bytes([group_id]) if group_id else block_hash


class _Asked:
    """As much of `ports.ExternalBlocks` as a look-up needs."""

    def __init__(self, store: SimStore, tier: Callable[[], str]) -> None:
        self._store = store
        self._tier = tier

    async def lookup(
        self, fingerprint: str, group_ids: Sequence[int], hashes: Sequence[bytes], adapter: str = ""
    ) -> tuple[tuple[str, ...], int]:
        tiers = []
        for block_hash in hashes:
            if any(store_name(group_id, block_hash) not in self._store.blocks for group_id in group_ids):
                break
            tiers.append(self._tier())
        return tuple(tiers), self._store.generation


class SimWorker:
    def __init__(
        self, num_blocks: int, block_size: int, store: SimStore, groups: Sequence[GroupSpec] = (GroupSpec(),)
    ) -> None:
        self.block_size = block_size
        self.groups = groups
        self.slots = [0] * (num_blocks * block_size)
        self.store = store
        self.requests: dict[int, _State] = {}
        self.loads: list[BlockLoad] = []
        self.saving: list[tuple[BlockSave, list[int]]] = []
        """Copied out, and not in the store yet."""
        self.hold_saves = False
        """They get there only in `end_saves`."""
        self.max_step_tokens = 0

    def execute(self, plan: StepPlan) -> StepResult:
        for handle in plan.removed:
            self.requests.pop(handle, None)
        for save in plan.saves:
            self.saving.append((save, self.slots[self._block(save.block_id)]))
        if not self.hold_saves:
            self.end_saves()
        for group_id, source, target in plan.copies:
            assert group_id < len(self.groups)
            self.slots[self._block(target)] = self.slots[self._block(source)]
        for added in plan.added:
            assert added.handle not in self.requests
            self.requests[added.handle] = _State(
                unpack_ids(added.token_ids),
                [unpack_ids(table) for table in added.block_ids],
                added.num_prompt_tokens,
                added.sampling,
            )
        self.loads += plan.loads
        handles, tokens = [], []
        self.max_step_tokens = max(self.max_step_tokens, plan.num_tokens)
        # As in a model, every layer writes all K and V of the step before any is read.
        computed = [self._compute(item.handle, item) for item in plan.scheduled]
        for check in computed:
            check()
        logprobs = []
        for item in plan.scheduled:
            state = self.requests[item.handle]
            rows = RequestLogprobs(item.handle, prompt=self._prompt_rows(state, item))
            if item.sample:
                end = item.num_computed_tokens + item.num_new_tokens
                assert end == len(state.token_ids), (end, len(state.token_ids))
                token_id = next_token(self.slots[self._slot(state, end - 1)])
                state.token_ids.append(token_id)
                handles.append(item.handle)
                tokens.append(token_id)
                if (num_top := state.sampling.num_logprobs) is not None:
                    prefix = self.slots[self._slot(state, end - 1)]
                    row = logprob_row(prefix, token_id, num_top)
                    rows = RequestLogprobs(item.handle, row, rows.prompt)
            if rows.output or rows.prompt:
                logprobs.append(rows)
        return StepResult(plan.step_id, pack_ids(handles), pack_ids(tokens), 0.0, logprobs=tuple(logprobs))

    def _prompt_rows(self, state: _State, item: ScheduledRequest) -> bytes:
        """From what the slots hold: a position that was not computed in this step gives none."""
        num_top = state.sampling.num_prompt_logprobs
        if num_top is None:
            return b""
        end = min(item.num_computed_tokens + item.num_new_tokens, state.num_prompt_tokens - 1)
        return b"".join(
            logprob_row(self.slots[self._slot(state, at)], state.token_ids[at + 1], num_top)
            for at in range(item.num_computed_tokens, end)
        )

    def _compute(self, handle, item):
        state = self.requests[handle]
        for table, new_block_ids in zip(state.tables, item.new_block_ids, strict=bool(item.new_block_ids)):
            table.extend(unpack_ids(new_block_ids))
        start, end = item.num_computed_tokens, item.num_computed_tokens + item.num_new_tokens
        assert item.num_new_tokens > 0
        assert end <= len(state.token_ids)
        prefix = EMPTY_PREFIX
        for token_id in state.token_ids[:start]:
            prefix = extend_prefix(prefix, token_id)
        for position in range(start, end):
            prefix = extend_prefix(prefix, state.token_ids[position])
            for group_id in range(len(self.groups)):
                self.slots[self._slot(state, position, group_id)] = content_of(prefix, group_id)

        def check() -> None:
            # Everything that attention reads.
            inner = EMPTY_PREFIX
            firsts = [_first_read(group, start) for group in self.groups]
            for position, token_id in enumerate(state.token_ids[:end]):
                inner = extend_prefix(inner, token_id)
                for group_id, first in enumerate(firsts):
                    if position >= first:
                        held = self.slots[self._slot(state, position, group_id)]
                        assert held == content_of(inner, group_id), (handle, position, group_id)

        return check

    def _slot(self, state: _State, position: int, group_id: int = 0) -> int:
        block_id = state.tables[group_id][position // self.block_size]
        assert block_id != 0, "the null block was handed out"
        return block_id * self.block_size + position % self.block_size

    def _block(self, block_id: int) -> slice:
        return slice(block_id * self.block_size, (block_id + 1) * self.block_size)

    def end_saves(self, count: int | None = None) -> int:
        """The oldest are in the store now; how many that are."""
        ended = self.saving[:count]
        del self.saving[:count]
        for save, content in ended:
            if save.generation == self.store.generation:
                self.store.blocks[store_name(save.group_id, save.block_hash)] = content
        return len(ended)

    def end_load(self, load: BlockLoad, fail) -> LoadReport:
        """`fail()` decides per block; a block that the store does not have fails too."""
        failed = []
        for block_id, block_hash in zip(unpack_ids(load.block_ids), load.block_hashes, strict=True):
            content = self.store.blocks.get(store_name(load.group_id, block_hash))
            if content is None or load.generation != self.store.generation or fail():
                self.slots[self._block(block_id)] = [-1] * self.block_size
                failed.append(block_id)
            else:
                self.slots[self._block(block_id)] = content
        self.loads.remove(load)
        return LoadReport(load.handle, load.group_id, pack_ids(failed), "missing" if failed else "")
