"""What the scheduler needs from outside."""

from collections.abc import Sequence
from typing import Protocol

from reprise_core.ids import BlockHash
from reprise_core.kv_events import KvEvent
from reprise_core.models import ModelInfo, WorkerCapacity
from reprise_core.steps import StepPlan, StepResult, TransferReport


class ExternalBlocks(Protocol):
    """The store's control side, for one model."""

    async def lookup(
        self, model_fingerprint: str, num_groups: int, block_hashes: Sequence[BlockHash]
    ) -> tuple[tuple[str, ...], int]:
        """Per block from the front the tier that has it, and the generation. Raises RepriseError."""

    async def reset(self, model_fingerprint: str) -> int:
        """Clears the model's blocks in every tier; the new generation. Raises RepriseError."""


class EventSink(Protocol):
    def send(self, events: Sequence[KvEvent]) -> None:
        """Never blocks; what cannot be queued is dropped and leaves a gap."""


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
