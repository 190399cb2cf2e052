"""The one stream to one engine, shared by all sequences that run there.

The link attaches, submits, aborts and finishes; after a break it attaches again and names the next
token wanted of each sequence. What it cannot keep, it gives back to the fleet.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import msgspec

from reprise_core.errors import ErrorKind
from reprise_core.extra_keys import LoraAdapter
from reprise_core.requests import FinishReason, SamplingParams
from reprise_gateway.metrics import GatewayMetrics
from reprise_gateway.ports import EngineApi, EngineStream
from reprise_gateway.sequence import OutOfStep, Sequence
from reprise_runtime.logs import get_logger
from reprise_wire.clients.engine import Ending, EngineInfo, RequestDelta, Submission
from reprise_wire.error_codec import PeerError

_MAX_SLOW_ANSWERS = 3
"""Info calls in a row that may run out of time before the engine counts as unable to serve."""
_LOST_KINDS = (ErrorKind.NOT_FOUND, ErrorKind.UNAVAILABLE)


class LinkOwner(Protocol):
    def on_tokens(self, sequence: Sequence) -> None:
        """New tokens, or a good end."""

    def on_refused(self, sequence: Sequence, ending: Ending) -> None:
        """The engine ended it with an error of the request's own."""

    def on_lost(self, sequences: list[Sequence]) -> None:
        """The engine does not have them any more; they are to go on elsewhere, or here once it is back."""

    def on_state(self, link: "EngineLink") -> None:
        """Whether it can serve may have changed."""


@dataclass(slots=True)
class _Entry:
    sequence: Sequence
    submitted: bool = False


@dataclass(frozen=True, slots=True)
class _Command:
    """`num_output_tokens` is set for a finish."""

    kind: str
    wire_id: str
    num_output_tokens: int = 0


class EngineLink:
    """Limits: commands wait in a queue that holds at most a submit and an end per sequence."""

    def __init__(
        self,
        address: str,
        api: EngineApi,
        *,
        gateway_id: str,
        owner: LinkOwner,
        metrics: GatewayMetrics,
        grace_s: float,
        retry_interval_s: float,
        info_interval_s: float,
        connect_timeout_s: float,
    ) -> None:
        self.address = address
        self.api = api
        self.info: EngineInfo | None = None
        self.problem: str | None = f"engine {address}: not connected yet"
        """Why it cannot serve; None = it can."""
        self._gateway_id = gateway_id
        self._owner = owner
        self._metrics = metrics
        self._grace_s = grace_s
        self._retry_interval_s = retry_interval_s
        self._info_interval_s = info_interval_s
        self._connect_timeout_s = connect_timeout_s
        self._log = get_logger()
        self._entries: dict[str, _Entry] = {}
        self._wire_ids: dict[Sequence, str] = {}
        self._commands: deque[_Command] = deque()
        self._wake = asyncio.Event()
        self._broken_at_s: float | None = None

    @property
    def serving(self) -> bool:
        return self.problem is None

    @property
    def num_inflight(self) -> int:
        return len(self._entries)

    # -- requests -----------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        # A new id each time: an engine that still remembers an earlier try would ignore a repeated one.
        wire_id = f"{sequence.request_id}.{sequence.num_resubmissions}"
        self._entries[wire_id] = _Entry(sequence)
        self._wire_ids[sequence] = wire_id
        self._command(_Command("submit", wire_id))

    def abort(self, sequence: Sequence) -> None:
        self._end(sequence, "abort")

    def finish(self, sequence: Sequence, num_output_tokens: int) -> None:
        """A stop string matched: tokens past that number do not count."""
        self._end(sequence, "finish", num_output_tokens)

    def _end(self, sequence: Sequence, kind: str, num_output_tokens: int = 0) -> None:
        wire_id = self._wire_ids.pop(sequence, None)
        if wire_id is not None:
            entry = self._entries.pop(wire_id)
            if entry.submitted:
                self._command(_Command(kind, wire_id, num_output_tokens))

    def _command(self, command: _Command) -> None:
        self._commands.append(command)
        self._wake.set()

    def _release(self, wire_id: str) -> Sequence:
        sequence = self._entries.pop(wire_id).sequence
        del self._wire_ids[sequence]
        return sequence

    # -- the stream ---------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            try:
                stream = await self.api.attach(
                    self._gateway_id, self._resume_points(), timeout_s=self._connect_timeout_s
                )
            except PeerError as error:
                self._set_problem(self._named(error))
                self._give_up_overdue()
                await asyncio.sleep(self._retry_interval_s)
                continue
            try:
                await self._exchange(stream)
            except (PeerError, OutOfStep) as error:
                self._log.warning("engine stream broke", engine=self.address, error=str(error))
                self._set_problem(self._named(error))
            finally:
                stream.cancel()
            self._metrics.stream_breaks.labels("engine").inc()
            self._broken()
            await asyncio.sleep(self._retry_interval_s)

    def _resume_points(self) -> dict[str, int]:
        return {
            wire_id: len(entry.sequence.output_ids)
            for wire_id, entry in self._entries.items()
            if entry.submitted
        }

    async def _exchange(self, stream: EngineStream) -> None:
        self._broken_at_s = None
        tasks = [
            asyncio.ensure_future(task) for task in (self._write(stream), self._read(stream), self._watch())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in ended:
            if isinstance(outcome, Exception):
                raise outcome

    async def _write(self, stream: EngineStream) -> None:
        while True:
            while self._commands:
                await self._send(stream, self._commands.popleft())
            self._wake.clear()
            await self._wake.wait()

    async def _send(self, stream: EngineStream, command: _Command) -> None:
        if command.kind == "submit":
            entry = self._entries.get(command.wire_id)
            if entry is not None:
                entry.submitted = True
                await stream.submit(_submission(command.wire_id, entry.sequence, self.info))
        elif command.kind == "finish":
            await stream.finish(command.wire_id, command.num_output_tokens)
        else:
            await stream.abort(command.wire_id)

    async def _read(self, stream: EngineStream) -> None:
        while (deltas := await stream.read()) is not None:
            for delta in deltas:
                self._take(delta)
        raise PeerError(ErrorKind.UNAVAILABLE, "ended the stream")

    def _take(self, delta: RequestDelta) -> None:
        entry = self._entries.get(delta.request_id)
        if entry is None:
            return  # it ended here already; its last tokens were on their way
        ending = delta.ending
        if ending is not None and _is_loss(ending):
            if ending.error_kind is ErrorKind.UNAVAILABLE:
                self._set_problem(self._named(ending.error))
            self._owner.on_lost([self._release(delta.request_id)])
            return
        if ending is not None and ending.reason is FinishReason.ERROR:
            self._owner.on_refused(self._release(delta.request_id), ending)
            return
        entry.sequence.take_tokens(delta)
        if ending is not None:
            self._release(delta.request_id)
        self._owner.on_tokens(entry.sequence)

    async def _watch(self) -> None:
        """Attached is not enough: an engine without a worker cannot serve."""
        num_slow = 0
        while True:
            try:
                self.info = await self.api.info()
            except PeerError as error:
                # A busy machine answers late now and then; that alone is no reason to turn away from it.
                num_slow = num_slow + 1 if error.kind is ErrorKind.DEADLINE else _MAX_SLOW_ANSWERS
                if num_slow >= _MAX_SLOW_ANSWERS:
                    self._set_problem(self._named(error))
            else:
                num_slow = 0
                self._set_problem(None)
            await asyncio.sleep(self._info_interval_s if self.serving else self._retry_interval_s)

    # -- losses -------------------------------------------------------------------------------------

    def _broken(self) -> None:
        """Ends that were not sent are implied by what the next attach does not name."""
        self._broken_at_s = time.monotonic()
        self._commands = deque(command for command in self._commands if command.kind == "submit")
        fresh = [wire_id for wire_id, entry in self._entries.items() if not entry.sequence.output_ids]
        if fresh:
            # Nothing of them was shown: another engine may take them at once.
            self._owner.on_lost([self._release(wire_id) for wire_id in fresh])

    def _give_up_overdue(self) -> None:
        if self._broken_at_s is None or time.monotonic() - self._broken_at_s < self._grace_s:
            return
        self._broken_at_s = None
        lost = [self._release(wire_id) for wire_id in list(self._entries)]
        self._commands.clear()
        self._owner.on_lost(lost)

    def _named(self, problem: object) -> str:
        text, name = str(problem), f"engine {self.address}: "
        return text if text.startswith(name) else name + text

    def _set_problem(self, problem: str | None) -> None:
        if problem != self.problem:
            self.problem = problem
            self._metrics.engine_up.labels(self.address).set(problem is None)
            self._owner.on_state(self)


def _is_loss(ending: Ending) -> bool:
    """The engine does not know the request, dropped it, or cannot serve at all."""
    if ending.reason is FinishReason.ABORT:
        return True
    return ending.reason is FinishReason.ERROR and ending.error_kind in _LOST_KINDS


def _submission(wire_id: str, sequence: Sequence, info: EngineInfo | None) -> Submission:
    work = sequence.work
    profile_id = info.hash_profile.profile_id if info is not None else ""
    adapter, hashes = work.adapter, work.hashes.get(profile_id)
    if adapter is not None:
        own = info.adapter(adapter.name) if info is not None else None
        if own is not None and own.path != adapter.path:
            adapter, hashes = own, None  # the path is hashed
        adapter = LoraAdapter(adapter.name, 0, adapter.path, work.adapter_digest)
    return Submission(
        request_id=wire_id,
        token_ids=(*work.prompt_ids, *sequence.output_ids),
        sampling=_sampling(sequence),
        block_hashes=hashes,
        cache_salt=work.cache_salt,
        lora=adapter,
        priority=work.priority,
        tenant=work.tenant,
        pin=work.pin,
        pin_ttl_s=work.pin_ttl_s,
        timeout_s=_remaining_s(work.deadline_s),
        traceparent=sequence.traceparent,
        num_output_tokens=len(sequence.output_ids),
    )


def _sampling(sequence: Sequence) -> SamplingParams:
    """The prompt is measured before the first token: with one, that is done."""
    sampling = sequence.work.sampling
    return msgspec.structs.replace(sampling, prompt_logprobs=None) if sequence.output_ids else sampling


def _remaining_s(deadline_s: float | None) -> float:
    """0 = no deadline; one that has passed is given the least time there is."""
    return 0.0 if deadline_s is None else max(deadline_s - time.monotonic(), 0.001)
