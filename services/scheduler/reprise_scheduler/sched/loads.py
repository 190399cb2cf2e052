"""Blocks that come from the store: how many, into which blocks, and what the end of a load means."""

from collections.abc import Iterable

from reprise_core.errors import ErrorKind
from reprise_core.ids import BlockId
from reprise_core.requests import FinishReason
from reprise_core.steps import BlockLoad, LoadReport, pack_ids, unpack_ids
from reprise_scheduler.kv_cache.config import NULL_BLOCK
from reprise_scheduler.kv_cache.miss_reasons import MissKind, MissReason
from reprise_scheduler.kv_cache.request import PrefixHit
from reprise_scheduler.sched.admissions import Admissions
from reprise_scheduler.sched.config import LoadFailurePolicy
from reprise_scheduler.sched.draft import Draft
from reprise_scheduler.sched.load_cost import LoadSkip
from reprise_scheduler.sched.outputs import Output, error_output
from reprise_scheduler.sched.request import Request, RequestStatus
from reprise_scheduler.sched.state import EngineState
from reprise_scheduler.sched.stored_blocks import NOTHING_STORED


class Loads:
    """Invariant: while a request is in `loading`, the blocks that its load writes to are held."""

    def __init__(self, state: EngineState, admissions: Admissions) -> None:
        self._state = state
        self._admissions = admissions

    def external_tokens(self, request: Request, hit: PrefixHit, now_s: float) -> int:
        """What is to be loaded after the hit: what the store has, as far as it is worth it and may be."""
        state = self._state
        num_tokens = state.connector.external_tokens(request, hit.num_tokens, now_s=now_s)
        if num_tokens and not request.external.weighed:
            size = state.kv_config.hash_block_size
            first, end = hit.num_tokens // size, (hit.num_tokens + num_tokens) // size
            tiers = state.connector.ranges.tiers(request.external.stored, first, end)
            num_worth = state.connector.cost.num_worth_loading(tiers)
            # A load that nobody runs beside starves nobody.
            limit = state.gate.limit_blocks if state.running else state.kv_config.num_blocks
            num_allowed = state.connector.ranges.end_within(first, end, limit) - first
            request.external.weighed = True
            request.external.limit_blocks = first + min(num_worth, num_allowed)
            if num_worth < end - first:
                request.external.skip = LoadSkip.SLOWER
                state.counters.loads_skipped_slower += 1
            elif num_allowed < end - first:
                request.external.skip = LoadSkip.NO_ROOM
                state.counters.loads_skipped_no_room += 1
            num_tokens = state.connector.external_tokens(request, hit.num_tokens, now_s=now_s)
        if request.miss is not None and request.external.skip is not None:
            request.miss = MissReason(MissKind.LOAD_SKIPPED, hit.num_tokens, rule=request.external.skip.value)
        return num_tokens

    def defer(self, request: Request, hit: PrefixHit, num_external: int) -> bool:
        """Whether the load may not begin now: then the request waits apart, and others pass it."""
        state = self._state
        size = state.kv_config.hash_block_size
        first, end = hit.num_tokens // size, (hit.num_tokens + num_external) // size
        num_blocks = state.connector.ranges.num_blocks(first, end)
        if state.gate.admits(request.block_hashes[first:end], num_blocks):
            return False
        state.waiting.remove(request)
        state.gate.deferred[request.sequence] = request
        return True

    def start(self, draft: Draft, request: Request, hit: PrefixHit, num_external: int, now_s: float) -> bool:
        """Blocks for the external tokens, unhashed until they are filled."""
        state = self._state
        allocated = state.manager.allocate(
            request,
            0,
            num_computed_tokens=0,
            hit=hit,
            num_external_tokens=num_external,
            delay_caching=True,
            must_fit=state.config.must_fit,
            is_admission=True,
            others_running=bool(state.running),
        )
        if allocated is None:
            return False
        state.waiting.pop()
        self._admissions.record(request, hit)
        request.admitted = True
        request.num_computed_tokens = hit.num_tokens
        request.external.load_tokens = num_external
        request.external.load_started_s = now_s
        request.external.generation = state.connector.generation
        request.status = RequestStatus.LOADING
        request.handle = state.take_handle()
        state.loading[request.handle] = request
        state.counters.loads_started += 1
        first, end = self._range(request)
        num_blocks = state.connector.ranges.num_blocks(first, end)
        state.gate.began(request, num_blocks, request.block_hashes[first:end])
        loads = self._block_loads(request)
        assert loads, "a load of nothing would never end"
        request.external.awaited = {load.group_id for load in loads}
        request.external.reports = []
        draft.loads += loads
        return True

    def end(self, reports: Iterable[LoadReport], *, now_s: float) -> list[Output]:
        """Reports of loads; a request goes on when those of all its groups are there. A short load is cut to
        its last good block before the first failure and the rest is computed, or its request ends with an
        error, which is returned."""
        state = self._state
        outputs = []
        for report in reports:
            request = state.loading.get(report.handle)
            if request is None or report.group_id not in request.external.awaited:
                continue
            request.external.awaited.remove(report.group_id)
            request.external.reports.append(report)
            if request.external.awaited:
                continue
            del state.loading[report.handle]
            output = self._end(request, request.external.reports, now_s)
            for other in state.gate.ended(request):
                state.waiting.add(other)
            if output is not None:
                outputs.append(output)
        return outputs

    def _end(self, request: Request, reports: list[LoadReport], now_s: float) -> Output | None:
        state = self._state
        request.handle = 0
        first, end = self._range(request)
        tiers = state.connector.ranges.tiers(request.external.stored, first, end)
        state.connector.cost.measure_load(tiers, now_s - request.external.load_started_s)
        if request.finished:
            state.take_back(request)
            return None
        size = state.kv_config.hash_block_size
        failed = self._failed_indices(request, reports)
        state.counters.load_failures += len(failed)
        state.connector.note_failed((request.block_hashes[index] for index in failed), now_s=now_s)
        good = min([end, *failed])
        if request.external.generation != state.connector.generation:
            good = first  # A reset came between, and was to drop these.
        if failed and state.config.load_failure_policy is LoadFailurePolicy.FAIL:
            return self._fail(request, len(failed), reports)
        if not state.connector.ranges.can_cut(end, good):
            # A window before the good end reaches back to blocks that are not held: it is looked up again,
            # here and in the store, without the blocks that failed.
            state.requeue(request)
            return None
        self._resume(request, good * size, tiers[: good - first])
        return None

    def _failed_indices(self, request: Request, reports: list[LoadReport]) -> list[int]:
        tables = self._state.manager.block_ids(request.request_id)
        return [
            tables[report.group_id].index(BlockId(block_id))
            for report in reports
            for block_id in unpack_ids(report.failed_block_ids)
        ]

    def _resume(self, request: Request, num_tokens: int, tiers: list[str]) -> None:
        """It waits to run; so many tokens from the front are there, the last of them out of these tiers."""
        state = self._state
        request.external.load_tokens = num_tokens - request.num_computed_tokens
        if request.num_preemptions == 0:
            state.counters.external_hit_tokens += request.external.load_tokens
        else:
            state.counters.preempted_external_hit_tokens += request.external.load_tokens
        self._admissions.note_sources(request, tiers)
        request.external.stored = NOTHING_STORED
        request.num_computed_tokens = num_tokens
        request.status = RequestStatus.WAITING
        state.manager.cache_blocks(request, num_tokens)
        state.waiting.add(request)

    def _fail(self, request: Request, num_failed: int, reports: list[LoadReport]) -> Output:
        """The blocks were never hashed, so nothing of the failed load can be found."""
        reasons = ", ".join(sorted({report.reason for report in reports if report.reason}))
        request.status = RequestStatus.WAITING
        self._state.end(request, FinishReason.ERROR)
        return error_output(
            request,
            ErrorKind.INTERNAL,
            f"kv_load_failure_policy is fail: {num_failed} external blocks could not be loaded ({reasons})",
        )

    def _range(self, request: Request) -> tuple[int, int]:
        """First and end of the blocks that its load fills."""
        size, first_token = self._state.kv_config.hash_block_size, request.num_computed_tokens
        return first_token // size, (first_token + request.external.load_tokens) // size

    def _block_loads(self, request: Request) -> list[BlockLoad]:
        """One for each group that reads any of the blocks; those before its window are null ones."""
        first, end = self._range(request)
        generation = self._state.connector.generation
        assert generation is not None
        loads = []
        for group_id, table in enumerate(self._state.manager.block_ids(request.request_id)):
            indices = [index for index in range(first, end) if table[index] != NULL_BLOCK]
            if indices:
                block_ids = pack_ids(table[index] for index in indices)
                hashes = tuple(request.block_hashes[index] for index in indices)
                loads.append(
                    BlockLoad(request.handle, group_id, block_ids, hashes, generation, request.adapter_id)
                )
        return loads
