"""The scheduler's side of the KV connector: what the store has, what to load, what to save.

Look-ups never block a step: a request that could profit waits apart until the answer is there, for
a limited time. A block is offered for saving only after the step that computed it is confirmed, and
leaves in a plan only if it still carries the hash it was offered with before that plan hands out
blocks: one that was handed out again meanwhile has lost it, or was filled anew by an earlier plan.
The worker copies it out before the plan overwrites anything.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from reprise_core.ids import BlockHash, BlockId, GroupId
from reprise_core.steps import BlockSave
from reprise_scheduler.sched.config import KvRole, SchedulerConfig
from reprise_scheduler.sched.outputs import Counters
from reprise_scheduler.sched.request import Request

NULL_BLOCK = 0
HashOfBlock = Callable[[BlockId], BlockHash | None]


class Connector:
    def __init__(
        self, config: SchedulerConfig, *, enabled: bool, block_size: int, num_groups: int, counters: Counters
    ) -> None:
        self.enabled = enabled
        self.looking_up: dict[int, Request] = {}
        """By sequence: requests that wait for the store's answer."""
        self.generation: int | None = None
        """Of the external tier, as it last answered; None = never reached, and nothing is saved."""
        self.saves = SaveQueue(max_pending=config.max_pending_saves, counters=counters)
        self._loads = config.kv_role is not KvRole.PRODUCER
        self._saves = config.kv_role is not KvRole.CONSUMER
        self._max_wait_s = config.max_external_wait_s
        self._block_size = block_size
        self._groups = [GroupId(index) for index in range(num_groups)]
        self._counters = counters
        self._wanted: list[Request] = []

    def ask(self, request: Request) -> bool:
        """Whether the request has to wait for an answer before it may be admitted."""
        num_blocks = (request.num_tokens - 1) // self._block_size
        request.external_tiers = ()
        if not self.enabled or not self._loads or num_blocks == 0 or request.skip_lookup:
            return False
        request.external_wait_until_s = None
        self.looking_up[request.sequence] = request
        self._wanted.append(request)
        return True

    def take_lookups(self, now_s: float) -> list[tuple[Request, int]]:
        """Look-ups to start, each with its attempt, which the answer repeats."""
        wanted, self._wanted = self._wanted, []
        started = []
        for request in wanted:
            if self.looking_up.get(request.sequence) is request:
                request.external_wait_until_s = now_s + self._max_wait_s
                started.append((request, request.num_preemptions))
        return started

    def answer(self, request: Request, attempt: int, tiers: Sequence[str], generation: int | None) -> bool:
        """`tiers`: per block from the front the tier that has it; the first miss ends the list.

        `generation` None = the store could not be asked. True when the request may now be admitted;
        answers that come too late are ignored.
        """
        if generation is not None:
            self.set_generation(generation)
        if attempt != request.num_preemptions or self.looking_up.get(request.sequence) is not request:
            return False
        del self.looking_up[request.sequence]
        request.external_tiers = tuple(tiers)
        if generation is not None:
            self._note_stored(request, len(tiers))
        return True

    def expire(self, now_s: float) -> list[Request]:
        """Requests that have waited long enough: they go on without the store."""
        late = [
            request
            for request in self.looking_up.values()
            if request.external_wait_until_s is not None and now_s >= request.external_wait_until_s
        ]
        for request in late:
            del self.looking_up[request.sequence]
            self._counters.external_wait_timeouts += 1
        return late

    def set_generation(self, generation: int) -> None:
        """Another generation than before: everything saved so far is gone."""
        if generation != self.generation:
            self.saves.forget_all()
        self.generation = generation

    def external_tokens(self, request: Request, num_local_tokens: int) -> int:
        """Tokens after the local hit that the store can supply; at least one is left to compute."""
        num_blocks = min(len(request.external_tiers or ()), (request.num_tokens - 1) // self._block_size)
        return max(num_blocks * self._block_size - num_local_tokens, 0)

    def offer(self, request: Request, num_tokens: int, tables: Sequence[Sequence[BlockId]]) -> None:
        """Blocks of the request up to `num_tokens` confirmed tokens are worth saving."""
        num_blocks = min(num_tokens // self._block_size, len(request.block_hashes))
        if not self.enabled or not self._saves or self.generation is None:
            return
        for index in range(request.num_saved_blocks, num_blocks):
            for group_id, table in zip(self._groups, tables, strict=True):
                if table[index] != NULL_BLOCK:
                    self.saves.offer(group_id, table[index], request.block_hashes[index])
        request.num_saved_blocks = max(request.num_saved_blocks, num_blocks)

    def take_saves(self, limit: int, hash_of_block: HashOfBlock) -> tuple[BlockSave, ...]:
        if self.generation is None:
            return ()
        return self.saves.take(limit, generation=self.generation, hash_of_block=hash_of_block)

    def forget_worker(self) -> None:
        """The worker's blocks are gone: nothing that was offered can be saved any more."""
        self.saves.forget_all()

    def _note_stored(self, request: Request, num_stored: int) -> None:
        request.num_saved_blocks = 0
        for index, block_hash in enumerate(request.block_hashes):
            note = self.saves.note_stored if index < num_stored else self.saves.note_missing
            for group_id in self._groups:
                note(group_id, block_hash)


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
        self._pending: deque[tuple[GroupId, BlockId, BlockHash]] = deque()
        self._stored: OrderedDict[tuple[GroupId, BlockHash], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pending)

    def offer(self, group_id: GroupId, block_id: BlockId, block_hash: BlockHash) -> None:
        if (group_id, block_hash) in self._stored:
            self._stored.move_to_end((group_id, block_hash))
            return
        if len(self._pending) >= self._max_pending:
            self._counters.saves_dropped += 1
            return
        self.note_stored(group_id, block_hash)
        self._pending.append((group_id, block_id, block_hash))
        self._counters.saves_offered += 1

    def note_stored(self, group_id: GroupId, block_hash: BlockHash) -> None:
        self._stored[(group_id, block_hash)] = None
        if len(self._stored) > self._max_remembered:
            self._stored.popitem(last=False)

    def note_missing(self, group_id: GroupId, block_hash: BlockHash) -> None:
        """To be offered again when it comes up."""
        self._stored.pop((group_id, block_hash), None)

    def take(self, limit: int, *, generation: int, hash_of_block: HashOfBlock) -> tuple[BlockSave, ...]:
        saves: list[BlockSave] = []
        while self._pending and len(saves) < limit:
            group_id, block_id, block_hash = self._pending.popleft()
            if hash_of_block(block_id) == block_hash:
                saves.append(BlockSave(group_id, block_id, block_hash, generation))
            else:
                self.note_missing(group_id, block_hash)
        return tuple(saves)

    def forget_all(self) -> None:
        self._pending.clear()
        self._stored.clear()
