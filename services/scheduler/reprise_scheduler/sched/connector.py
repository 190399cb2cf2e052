"""The scheduler's side of the KV connector: what the store has, what to load, what to save.

Look-ups never block a step: a request that could profit waits apart until the answer is there, for
a limited time. A block is offered for saving only after the step that computed it is confirmed, and
leaves in a plan only if it still carries the hash it was offered with before that plan hands out
blocks: one that was handed out again meanwhile has lost it, or was filled anew by an earlier plan.
The worker copies it out before the plan overwrites anything.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from reprise_core.ids import BlockHash, BlockId, GroupId
from reprise_core.steps import BlockSave
from reprise_scheduler.kv_cache.config import NULL_BLOCK
from reprise_scheduler.kv_cache.group import Group
from reprise_scheduler.sched.config import KvRole, SchedulerConfig
from reprise_scheduler.sched.load_cost import LoadCost
from reprise_scheduler.sched.outputs import Counters
from reprise_scheduler.sched.request import External, Request, RequestStatus
from reprise_scheduler.sched.stored_blocks import LoadRanges, StoredBlocks

FAILED_FOR_S = 10.0
"""How long a block that could not be loaded is not asked for again: long enough that those who share it
reuse what the first of them computes."""
MAX_FAILED = 65_536
Holds = Callable[[BlockId, GroupId, BlockHash], bool]
"""Whether a block of a group still carries a hash."""


class Connector:
    def __init__(
        self,
        config: SchedulerConfig,
        *,
        enabled: bool,
        block_size: int,
        groups: Sequence[Group],
        cached: Callable[[], Sequence[BlockHash | None]],
        counters: Counters,
    ) -> None:
        """`block_size` is every group's, where the connector is enabled. `cached`: the hash that each block
        of the device carries now, by block id."""
        self.enabled = enabled
        self.looking_up: dict[int, Request] = {}
        """By sequence: requests that wait for the store's answer."""
        self.generation: int | None = None
        """Of the external tier, as it last answered; None = never reached, and nothing is saved."""
        self.cost = LoadCost(config.load_rule, block_size)
        self.ranges = LoadRanges(groups, block_size)
        self.num_saves_in_flight = 0
        """Blocks in plans, of which it is not known yet what came of them."""
        self.saves = SaveQueue(max_pending=config.max_pending_saves, counters=counters)
        self._loads = config.kv_role is not KvRole.PRODUCER
        self._saves = config.kv_role is not KvRole.CONSUMER
        self._max_wait_s = config.max_external_wait_s
        self._block_size = block_size
        self._groups = groups
        self._cached = cached
        self._counters = counters
        self._wanted: list[Request] = []
        self._wanted_again: list[Request] = []
        self._failed: OrderedDict[BlockHash, float] = OrderedDict()
        """Until when, on the clock of the plans."""

    def ask(self, request: Request) -> bool:
        """Whether the request has to wait for an answer before it may be admitted."""
        num_blocks = (request.num_tokens - 1) // self._block_size
        request.external = External()
        if not self.loads_for(request) or num_blocks == 0:
            return False
        self.looking_up[request.sequence] = request
        self._wanted.append(request)
        if request.num_preemptions and self._num_saves_over < self.saves.num_queued:
            request.external.saves_to_await = self.saves.num_queued
        return True

    def ask_again(self, request: Request) -> None:
        """The first of those that wait. One whose newest blocks were on their way to the store when it was
        preempted is asked for once more when they are there, while it waits on."""
        num_saves = request.external.saves_to_await
        if num_saves is not None and self._num_saves_over >= num_saves:
            request.external.saves_to_await = None
            self._wanted_again.append(request)

    @property
    def _num_saves_over(self) -> int:
        """Blocks that were queued for saving, and of which it is known what came of them."""
        return self.saves.num_queued - len(self.saves) - self.num_saves_in_flight

    def loads_for(self, request: Request) -> bool:
        return self.enabled and self._loads and not request.skip_lookup

    def take_lookups(self, now_s: float) -> list[tuple[Request, int]]:
        """Look-ups to start, each with its attempt, which the answer repeats."""
        wanted, self._wanted = self._wanted, []
        started = []
        for request in wanted:
            if self.looking_up.get(request.sequence) is request:
                request.external.wait_until_s = now_s + self._max_wait_s
                started.append((request, request.num_preemptions))
        again, self._wanted_again = self._wanted_again, []
        still_waiting = [request for request in again if request.status is RequestStatus.PREEMPTED]
        self._counters.lookups_again += len(still_waiting)
        return started + [(request, request.num_preemptions) for request in still_waiting]

    def answer(self, request: Request, attempt: int, stored: StoredBlocks, generation: int | None) -> bool:
        """`generation` None = the store could not be asked. True when the request may now be admitted;
        answers that come too late are ignored. One that waits may be answered again."""
        if generation is not None:
            self.set_generation(generation)
        was_apart = self.looking_up.get(request.sequence) is request
        waits = was_apart or (request.status is RequestStatus.PREEMPTED and generation is not None)
        if attempt != request.num_preemptions or not waits:
            return False
        self.looking_up.pop(request.sequence, None)
        request.external.answer(stored)
        if generation is not None:
            self._note_stored(request, stored)
        return was_apart

    def expire(self, now_s: float) -> list[Request]:
        """Requests that have waited long enough: they go on without the store."""
        late = [
            request
            for request in self.looking_up.values()
            if request.external.wait_until_s is not None and now_s >= request.external.wait_until_s
        ]
        for request in late:
            del self.looking_up[request.sequence]
            self._counters.external_wait_timeouts += 1
        return late

    def set_generation(self, generation: int) -> None:
        """Another generation than before: everything saved so far is gone, and what is on the device may be
        what a reset was to drop, so that is not saved again."""
        if generation != self.generation:
            self.saves.forget_all()
            if self.generation is not None:
                self.saves.keep_back(self._cached())
        self.generation = generation

    def external_tokens(self, request: Request, num_local_tokens: int, *, now_s: float) -> int:
        """Tokens after the local hit that the store can supply; at least one is left to compute."""
        size, external = self._block_size, request.external
        limit = min(external.limit_blocks, (request.num_tokens - 1) // size)
        self._forget_failed(now_s)
        failed: set[int] = set()
        if self._failed:
            failed = {i for i, digest in enumerate(request.block_hashes[:limit]) if digest in self._failed}
        first = num_local_tokens // size
        end = self.ranges.end(external.stored, first=first, limit=limit, failed=failed)
        return max(end * size - num_local_tokens, 0)

    def note_failed(self, block_hashes: Iterable[BlockHash], *, now_s: float) -> None:
        """These could not be loaded; once they are computed they are worth saving again."""
        for block_hash in block_hashes:
            self._failed.pop(block_hash, None)
            self._failed[block_hash] = now_s + FAILED_FOR_S
            for group in self._groups:
                self.saves.note_missing(group.id, block_hash)
        self._forget_failed(now_s)

    def _forget_failed(self, now_s: float) -> None:
        """Those whose time is over, and past the limit those whose time is over first."""
        while self._failed and (len(self._failed) > MAX_FAILED or next(iter(self._failed.values())) <= now_s):
            self._failed.popitem(last=False)

    def offer(self, request: Request, num_tokens: int, tables: Sequence[Sequence[BlockId]]) -> None:
        """Blocks of the request up to `num_tokens` confirmed tokens are worth saving.

        `tables` are those of the plan that filled the last of them: a block that has left its window since
        is offered too, for it can be saved as long as it carries its hash.
        """
        num_blocks = min(num_tokens // self._block_size, len(request.block_hashes))
        if not self.enabled or not self._saves or self.generation is None:
            return
        adapter_id = request.adapter_id
        for index in range(request.num_saved_blocks, num_blocks):
            for group, table in zip(self._groups, tables, strict=True):
                if table[index] != NULL_BLOCK:
                    self.saves.offer(group.id, table[index], request.block_hashes[index], adapter_id)
        request.num_saved_blocks = max(request.num_saved_blocks, num_blocks)

    def take_saves(self, limit: int, holds: Holds) -> tuple[BlockSave, ...]:
        if self.generation is None:
            return ()
        saves = self.saves.take(limit, generation=self.generation, holds=holds)
        self.num_saves_in_flight += len(saves)
        return saves

    def saves_ended(self, num_blocks: int) -> None:
        self.num_saves_in_flight = max(0, self.num_saves_in_flight - num_blocks)

    def forget_worker(self) -> None:
        """The worker's blocks are gone: nothing that was offered can be saved any more."""
        self.saves.forget_all()
        self.saves.keep_back(())
        self.num_saves_in_flight = 0

    def device_was_reset(self) -> None:
        """What it holds from now on is computed anew."""
        self.saves.keep_back(())

    def _note_stored(self, request: Request, stored: StoredBlocks) -> None:
        request.num_saved_blocks = 0
        for number, group in enumerate(self._groups):
            tiers = stored.tiers[number] if stored.tiers else ()
            for index, block_hash in enumerate(request.block_hashes):
                has = index < len(tiers) and tiers[index]
                note = self.saves.note_stored if has else self.saves.note_missing
                note(group.id, block_hash)


class SaveQueue:
    """Blocks to save, first in, first out.

    Limit: `max_pending`; at the limit an offer is dropped and counted. Remembers up to
    `max_remembered` hashes that were sent or that the store has, so that they are not offered
    again; the oldest are forgotten.
    """

    def __init__(self, *, max_pending: int, counters: Counters, max_remembered: int = 65_536) -> None:
        self._max_pending = max_pending
        self._max_remembered = max_remembered
        self._counters = counters
        self._pending: deque[tuple[GroupId, BlockId, BlockHash, int]] = deque()
        self.num_queued = 0
        """Since the start."""
        self._stored: OrderedDict[tuple[GroupId, BlockHash], None] = OrderedDict()
        self._kept_back: Sequence[BlockHash | None] = ()

    def __len__(self) -> int:
        return len(self._pending)

    def keep_back(self, block_hashes: Sequence[BlockHash | None]) -> None:
        """By block id: blocks that are not to be saved while they carry these hashes. One that is computed
        again in the very same place is taken for the old one, and left to others to save."""
        self._kept_back = block_hashes

    def offer(self, group_id: GroupId, block_id: BlockId, block_hash: BlockHash, adapter_id: int = 0) -> None:
        if self._kept_back and self._kept_back[block_id] == block_hash:
            return
        if (group_id, block_hash) in self._stored:
            self._stored.move_to_end((group_id, block_hash))
            return
        if len(self._pending) >= self._max_pending:
            self._counters.saves_dropped += 1
            return
        self.note_stored(group_id, block_hash)
        self._pending.append((group_id, block_id, block_hash, adapter_id))
        self.num_queued += 1
        self._counters.saves_offered += 1

    def note_stored(self, group_id: GroupId, block_hash: BlockHash) -> None:
        self._stored[(group_id, block_hash)] = None
        if len(self._stored) > self._max_remembered:
            self._stored.popitem(last=False)

    def note_missing(self, group_id: GroupId, block_hash: BlockHash) -> None:
        """To be offered again when it comes up."""
        self._stored.pop((group_id, block_hash), None)

    def take(self, limit: int, *, generation: int, holds: Holds) -> tuple[BlockSave, ...]:
        saves: list[BlockSave] = []
        while self._pending and len(saves) < limit:
            group_id, block_id, block_hash, adapter_id = self._pending.popleft()
            if holds(block_id, group_id, block_hash):
                saves.append(BlockSave(group_id, block_id, block_hash, generation, adapter_id))
            else:
                self.note_missing(group_id, block_hash)
        return tuple(saves)

    def forget_all(self) -> None:
        self._pending.clear()
        self._stored.clear()
