"""What the scheduler needs from outside."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from reprise_core.block_record import BlockRecord
from reprise_core.ids import BlockHash
from reprise_core.kv_events import KvEvent
from reprise_core.models import ModelInfo, WorkerCapacity
from reprise_core.steps import StepPlan, StepResult, TransferReport
from reprise_wire.store_codec import StoreStats, TierUpdate


class ExternalBlocks(Protocol):
    """The store's control side, for one model. `adapter` is a content digest, empty = none."""

    async def lookup(
        self,
        model_fingerprint: str,
        group_ids: Sequence[int],
        block_hashes: Sequence[BlockHash],
        adapter: str = "",
    ) -> tuple[tuple[str, ...], int]:
        """Per block from the front the tier that has it for each of the groups, up to the first that is
        missing, and the generation. Raises RepriseError."""

    async def reset(self, model_fingerprint: str) -> int:
        """Clears the model's blocks, its adapters' too, in every tier; the new generation. Raises
        RepriseError."""

    async def stats(self) -> StoreStats:
        """Raises RepriseError."""

    def watch_tiers(self, model_fingerprint: str, adapters: Sequence[str] = ()) -> AsyncIterator[TierUpdate]:
        """What the tiers have of the model and of these adapters, then every change. Ends, or raises
        RepriseError, when the store is lost."""


class EventSink(Protocol):
    def send(self, events: Sequence[KvEvent]) -> None:
        """Never blocks; what cannot be queued is dropped and leaves a gap."""

    def refresh_metrics(self, *, has_cached_blocks: bool) -> None:
        """About once a second, with what the cache itself says."""


class RecordedEvents(EventSink, Protocol):
    @property
    def record(self) -> BlockRecord:
        """Of all events that were sent, dropped ones too."""


class PlanSink(Protocol):
    def send_plan(self, plan: StepPlan) -> None:
        """To the worker of the open session."""


class WorkerEvents(Protocol):
    """What the worker link tells the engine loop."""

    def on_session(self, model: ModelInfo, capacity: WorkerCapacity) -> None:
        """A worker has registered: every block is empty. Raises RepriseError to refuse it."""

    def on_result(self, result: StepResult) -> None: ...

    def on_transfer(self, report: TransferReport) -> None: ...

    def on_lost(self, why: str) -> None: ...
