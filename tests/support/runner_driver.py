"""Drives a worker's `Runner` by step plans, as a scheduler would, with scrambled block tables."""

import random
from collections.abc import Mapping, Sequence

from reprise_core.ids import BlockHash, GroupId
from reprise_core.steps import (
    AddedRequest,
    BlockLoad,
    BlockSave,
    ScheduledRequest,
    StepPlan,
    WorkerSampling,
    pack_ids,
    unpack_ids,
)
from reprise_worker.attention import TorchAttention
from reprise_worker.kv_cache import KvCache
from reprise_worker.model import PagedModel
from reprise_worker.runner import Runner

GREEDY = WorkerSampling(0.0, 1.0, 0, None)


class NoMover:
    """For runs without a store; remembers what was asked."""

    def __init__(self) -> None:
        self.saves: list[BlockSave] = []
        self.loads: list[BlockLoad] = []

    def save(self, saves: Sequence[BlockSave]) -> int:
        self.saves += saves
        return 0

    def load(self, loads: Sequence[BlockLoad]) -> None:
        self.loads += loads


class Driver:
    """Keeps the tokens and the block table of each handle, and a pool of free blocks."""

    def __init__(
        self, model: PagedModel, *, num_blocks: int = 128, block_size: int = 4, seed: int = 0
    ) -> None:
        self.model = model
        self.kv = KvCache(
            model.layers,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
        )
        self.mover = NoMover()
        self.runner = Runner(model, self.kv, TorchAttention(), self.mover)
        self.free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tokens: dict[int, list[int]] = {}
        self.num_prompt: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.sampling: dict[int, WorkerSampling] = {}
        self.adapters: dict[int, int] = {}
        self.logprobs: dict[int, bytes] = {}
        self.prompt_logprobs: dict[int, bytes] = {}
        self._added: list[int] = []
        self._removed: list[int] = []
        self._step_id = 0

    def add(
        self,
        handle: int,
        prompt: Sequence[int],
        *,
        shared_blocks: Sequence[int] = (),
        sampling: WorkerSampling = GREEDY,
        num_output: int = 0,
        adapter_id: int = 0,
    ) -> None:
        """A request whose first blocks are `shared_blocks`, computed already. `num_output` of its
        tokens are output of an earlier life."""
        self.tokens[handle] = list(prompt)
        self.num_prompt[handle] = len(prompt) - num_output
        self.computed[handle] = len(shared_blocks) * self.kv.block_size
        self.blocks[handle] = list(shared_blocks)
        self.sampling[handle] = sampling
        self.adapters[handle] = adapter_id
        self._added.append(handle)

    def remove(self, handle: int, *, keep_blocks: bool = False) -> None:
        self._removed.append(handle)
        if not keep_blocks:
            self.free += self.blocks[handle]

    def step(self, schedule: dict[int, int], **more: object) -> dict[int, int]:
        """Computes so many tokens of each handle; answers the tokens drawn."""
        added, scheduled = [], []
        for handle, num_new in schedule.items():
            start = self.computed[handle]
            stop = start + num_new
            needed = -(-stop // self.kv.block_size) - len(self.blocks[handle])
            new_blocks = [self.free.pop(0) for _ in range(max(0, needed))]
            self.blocks[handle] += new_blocks
            sample = stop == len(self.tokens[handle])
            is_new = handle in self._added
            packed = () if is_new else (pack_ids(new_blocks),)
            scheduled.append(ScheduledRequest(handle, start, num_new, packed, sample))
            self.computed[handle] = stop
        for handle in self._added:
            added.append(
                AddedRequest(
                    handle=handle,
                    token_ids=pack_ids(self.tokens[handle]),
                    num_prompt_tokens=self.num_prompt[handle],
                    num_computed_tokens=self.computed[handle] - schedule.get(handle, 0),
                    block_ids=(pack_ids(self.blocks[handle]),),
                    sampling=self.sampling[handle],
                    adapter_id=self.adapters[handle],
                )
            )
        self._step_id += 1
        plan = StepPlan(
            self._step_id,
            removed=tuple(self._removed),
            added=tuple(added),
            scheduled=tuple(scheduled),
            **more,  # type: ignore[arg-type]
        )
        self._added, self._removed = [], []
        result = self.runner.execute(plan)
        for rows in result.logprobs:
            self.logprobs[rows.handle] = self.logprobs.get(rows.handle, b"") + rows.output
            self.prompt_logprobs[rows.handle] = self.prompt_logprobs.get(rows.handle, b"") + rows.prompt
        drawn = dict(zip(unpack_ids(result.handles), unpack_ids(result.token_ids), strict=True))
        for handle, token_id in drawn.items():
            self.tokens[handle].append(token_id)
        return drawn

    def remaining(self, handle: int) -> int:
        """Known tokens that are not computed."""
        return len(self.tokens[handle]) - self.computed[handle]

    def finish(self, handles: Sequence[int], num_tokens: int) -> None:
        """Steps, everything at once, until each handle has so many output tokens."""
        while waiting := [handle for handle in handles if len(self.output(handle)) < num_tokens]:
            self.step({handle: self.remaining(handle) for handle in waiting})

    def output(self, handle: int) -> list[int]:
        return self.tokens[handle][self.num_prompt[handle] :]


def run_mixed_batches(
    driver: Driver, prompts: Mapping[int, list[int]], *, chunks: Sequence[int], num_tokens: int
) -> dict[int, list[int]]:
    """Outputs by handle. Prefill, chunks and decodes in the same steps; requests come and go, their blocks
    are used again."""
    chance = random.Random(5)
    waiting, running = list(prompts), list[int]()
    outputs: dict[int, list[int]] = {}
    while waiting or running:
        if waiting and (not running or chance.random() < 0.5):
            handle = waiting.pop(0)
            driver.add(handle, prompts[handle])
            running.append(handle)
        driver.step({handle: min(driver.remaining(handle), chance.choice(chunks)) for handle in running})
        for handle in [handle for handle in running if len(driver.output(handle)) >= num_tokens]:
            outputs[handle] = driver.output(handle)
            driver.remove(handle)
            running.remove(handle)
    return outputs


def block_save(block_id: int, block_hash: bytes, *, generation: int = 0, adapter_id: int = 0) -> BlockSave:
    return BlockSave(GroupId(0), block_id, BlockHash(block_hash), generation, adapter_id)
