"""Executes step plans, one after another, in the order that `reprise_core.steps` documents."""

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from reprise_core.errors import DataLoss
from reprise_core.logprobs import MAX_LOGPROBS
from reprise_core.steps import (
    AddedRequest,
    BlockLoad,
    BlockSave,
    RequestLogprobs,
    ScheduledRequest,
    StepPlan,
    StepResult,
    pack_ids,
    unpack_ids,
)
from reprise_worker.attention import AttentionBackend
from reprise_worker.batch import ScheduledTokens, make_batch
from reprise_worker.kv_cache import KvCache
from reprise_worker.logprobs import StepLogprobs
from reprise_worker.model import PagedModel
from reprise_worker.request_state import RequestState
from reprise_worker.sampler import Draw, sample


class BadPlan(DataLoss):
    """A plan that does not fit this worker's state: the session cannot go on."""


class BlockMover(Protocol):
    """Moves blocks to and from the store, beside the steps."""

    def save(self, saves: Sequence[BlockSave]) -> int:
        """Copies the blocks out before it returns; answers how many were dropped."""

    def load(self, loads: Sequence[BlockLoad]) -> None:
        """Starts loads; each ends in one report."""


class Runner:
    """The requests of one session and the step that computes them.

    Invariants: a handle is known from the plan that adds it until the plan that removes it; block
    ids are in the pool and never the null block, except where a table holds none.
    """

    def __init__(self, model: PagedModel, kv: KvCache, backend: AttentionBackend, mover: BlockMover) -> None:
        self._model = model
        self._kv = kv
        self._backend = backend
        self._mover = mover
        self._num_groups = len(kv.groups)
        self._requests: dict[int, RequestState] = {}
        self._last_step_id = 0

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def reset(self) -> None:
        """Forgets a session's requests; block contents stay until they are overwritten."""
        self._requests.clear()
        self._last_step_id = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Raises BadPlan, before anything has changed, for a plan that cannot be executed."""
        started_s = time.perf_counter()
        added = self._check(plan)
        for handle in plan.removed:
            del self._requests[handle]
        num_dropped = self._mover.save(plan.saves) if plan.saves else 0
        for _, source, target in plan.copies:
            self._kv.copy_block(source, target)
        self._requests.update(added)
        if plan.loads:
            self._kv.settle()
            self._mover.load(plan.loads)
        handles, token_ids, logprobs = self._compute(plan.scheduled)
        self._kv.settle()  # a step that drew nothing may still be queued
        self._last_step_id = plan.step_id
        return StepResult(
            step_id=plan.step_id,
            handles=pack_ids(handles),
            token_ids=pack_ids(token_ids),
            model_time_s=time.perf_counter() - started_s,
            num_saves_dropped=num_dropped,
            logprobs=logprobs,
        )

    def _compute(
        self, scheduled: Sequence[ScheduledRequest]
    ) -> tuple[list[int], list[int], tuple[RequestLogprobs, ...]]:
        """Runs the model and draws; appends each drawn token to its request."""
        if not scheduled:
            return [], [], ()
        items = []
        for entry in scheduled:
            state = self._requests[entry.handle]
            for table, block_ids in zip(state.tables, entry.new_block_ids, strict=False):
                table.extend(unpack_ids(block_ids))
            items.append(
                ScheduledTokens(state, entry.num_computed_tokens, entry.num_new_tokens, entry.sample)
            )
        batch = make_batch(items, block_size=self._kv.block_size, device=self._model.device)
        logits = self._model.forward(batch, self._kv, self._backend)
        drawing = [item.state for item in items if item.sample]
        logprobs = StepLogprobs(items, logits)
        token_ids = sample(logits[: len(drawing)], [_draw(state) for state in drawing])
        for state, token_id in zip(drawing, token_ids, strict=True):
            state.tokens.extend([token_id])
        return [state.handle for state in drawing], token_ids, logprobs.of_tokens(token_ids)

    def _check(self, plan: StepPlan) -> dict[int, RequestState]:
        """The plan's new requests, once everything that the plan says has been checked."""
        if plan.step_id != self._last_step_id + 1:
            raise BadPlan(f"step {plan.step_id} follows step {self._last_step_id}")
        unknown = [handle for handle in plan.removed if handle not in self._requests]
        if unknown or len(set(plan.removed)) != len(plan.removed):
            raise BadPlan(f"step {plan.step_id} removes unknown handles {unknown[:8]}")
        groups = [group for group, _, _ in plan.copies]
        groups += [save.group_id for save in plan.saves] + [load.group_id for load in plan.loads]
        if groups and not 0 <= min(groups) <= max(groups) < self._num_groups:
            raise BadPlan(f"step {plan.step_id} names groups outside [0, {self._num_groups})")
        for _, *blocks in plan.copies:
            self._check_blocks(blocks)
        self._check_adapters([*plan.saves, *plan.loads, *plan.added])
        self._check_blocks([save.block_id for save in plan.saves])
        for load in plan.loads:
            blocks = _unpack(load.block_ids)
            self._check_blocks(blocks)
            if len(blocks) != len(load.block_hashes):
                raise BadPlan(f"a load has {len(blocks)} blocks and {len(load.block_hashes)} hashes")
        added = {entry.handle: self._check_added(entry) for entry in plan.added}
        if len(added) != len(plan.added) or added.keys() & (self._requests.keys() - set(plan.removed)):
            raise BadPlan(f"step {plan.step_id} adds a handle that is known")
        self._check_scheduled(plan, added)
        return added

    def _check_added(self, entry: AddedRequest) -> RequestState:
        if len(entry.block_ids) != self._num_groups:
            raise BadPlan(
                f"a request has {len(entry.block_ids)} block tables, this worker {self._num_groups} groups"
            )
        try:
            state = RequestState.from_added(entry)
        except ValueError as error:
            raise BadPlan(f"added request: {error}") from error
        tokens = state.tokens.view
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= self._model.vocab_size:
            raise BadPlan("an added request has no tokens, or tokens outside the vocabulary")
        banned = state.banned_token_ids
        if banned and not 0 <= min(banned) <= max(banned) < self._model.vocab_size:
            raise BadPlan("an added request bans tokens outside the vocabulary")
        for count in (entry.sampling.num_logprobs, entry.sampling.num_prompt_logprobs):
            if count is not None and not 0 <= count <= min(MAX_LOGPROBS, self._model.vocab_size):
                raise BadPlan(f"an added request wants {count} most probable tokens")
        for table in state.tables:
            self._check_blocks(table.view.tolist(), lowest=0)
        return state

    def _check_scheduled(self, plan: StepPlan, added: dict[int, RequestState]) -> None:
        seen: set[int] = set()
        for entry in plan.scheduled:
            state = added.get(entry.handle) or self._requests.get(entry.handle)
            if state is None or entry.handle in plan.removed or entry.handle in seen:
                raise BadPlan(f"step {plan.step_id} schedules handle {entry.handle}, unknown or twice")
            seen.add(entry.handle)
            if len(entry.new_block_ids) not in (0, self._num_groups):
                raise BadPlan(
                    f"new blocks for {len(entry.new_block_ids)} groups, this worker has {self._num_groups}"
                )
            new_blocks = [_unpack(block_ids) for block_ids in entry.new_block_ids]
            for block_ids in new_blocks:
                self._check_blocks(block_ids, lowest=0)
            context = entry.num_computed_tokens + entry.num_new_tokens
            known = len(state.tokens)
            if entry.num_computed_tokens < 0 or entry.num_new_tokens < 1 or context > known:
                raise BadPlan(f"tokens [{entry.num_computed_tokens}, {context}) of {known} known ones")
            if entry.sample and context != known:
                raise BadPlan(f"sampling after token {context} of {known} known ones")
            lengths = [len(table) for table in state.tables]
            if new_blocks:
                lengths = [length + len(ids) for length, ids in zip(lengths, new_blocks, strict=True)]
            if context > min(lengths) * self._kv.block_size:
                raise BadPlan(f"{context} tokens do not fit the block table of handle {entry.handle}")

    def _check_adapters(self, entries: Iterable[BlockSave | BlockLoad | AddedRequest]) -> None:
        for entry in entries:
            if not 0 <= entry.adapter_id <= self._model.num_adapters:
                raise BadPlan(f"adapter {entry.adapter_id}, this worker has {self._model.num_adapters}")

    def _check_blocks(self, block_ids: Sequence[int], lowest: int = 1) -> None:
        if block_ids and not lowest <= min(block_ids) <= max(block_ids) < self._kv.num_blocks:
            raise BadPlan(f"block ids outside [{lowest}, {self._kv.num_blocks})")


def _unpack(data: bytes) -> list[int]:
    try:
        return unpack_ids(data)
    except ValueError as error:
        raise BadPlan(f"packed ids: {error}") from error


def _draw(state: RequestState) -> Draw:
    index = state.num_output_tokens
    sampling = state.sampling
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=state.seed,
        output_index=index,
        banned_token_ids=state.banned_token_ids if index < sampling.min_tokens else (),
    )
