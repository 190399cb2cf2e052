"""All engines of this gateway: where a sequence runs, and where it goes when its engine is lost."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from reprise_core.extra_keys import LoraAdapter
from reprise_core.requests import FinishReason
from reprise_gateway.engine_link import EngineLink
from reprise_gateway.errors import ApiError, from_reprise_error, unknown_model
from reprise_gateway.metrics import GatewayMetrics
from reprise_gateway.routing import Candidate, Router
from reprise_gateway.sequence import Sequence
from reprise_gateway.text_link import TextLink
from reprise_wire.clients.engine import Ending, EngineInfo
from reprise_wire.error_codec import PeerError
from reprise_wire.hash_profiles import HashProfile

_CHECK_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Served:
    """What is served under a name: a model, or an adapter of it. `info` is of an engine that does."""

    info: EngineInfo
    adapter: LoraAdapter | None = None

    @property
    def name(self) -> str:
        return self.info.model_name if self.adapter is None else self.adapter.name


class Fleet:
    """Sequences without an engine wait `wait_s` for one and then fail; they are no more than the
    admitted sequences."""

    def __init__(
        self,
        router: Router,
        *,
        metrics: GatewayMetrics,
        wait_s: float,
        max_resubmissions: int,
        on_state: Callable[[str | None], None],
    ) -> None:
        self.links: list[EngineLink] = []
        self._router = router
        self._metrics = metrics
        self._wait_s = wait_s
        self._max_resubmissions = max_resubmissions
        self._on_state = on_state
        self._text: TextLink | None = None
        self._homes: dict[Sequence, EngineLink] = {}
        self._waiting: dict[Sequence, float] = {}
        self._changed = asyncio.Event()

    def wire(self, links: list[EngineLink], text: TextLink) -> None:
        """The links and the fleet know each other; this closes the circle, once, at start."""
        self.links = links
        self._text = text

    # -- what is known of the engines ---------------------------------------------------------------

    @property
    def can_serve(self) -> bool:
        return any(link.serving for link in self.links)

    def infos(self) -> list[EngineInfo]:
        return [link.info for link in self.links if link.info is not None]

    async def known_infos(self) -> list[EngineInfo]:
        """Waits for the first engine there ever was. Raises a 503 when none comes."""
        deadline_s = time.monotonic() + self._wait_s
        while not self.infos():
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                raise self._none_available() from None
        return self.infos()

    async def served(self, name: str | None) -> Served:
        """What a caller means by that name of a model or adapter; an empty one means the model."""
        infos = await self.known_infos()
        if not name:
            return Served(infos[0])
        for info in infos:
            if info.model_name == name:
                return Served(info)
        for info in infos:
            adapter = info.adapter(name)
            if adapter is not None:
                return Served(info, adapter)
        known = {info.model_name for info in infos}
        known |= {adapter.name for info in infos for adapter in info.adapters}
        raise unknown_model(name, sorted(known))

    def profiles(self, served: Served) -> tuple[HashProfile, ...]:
        """Distinct hash profiles of the engines that serve it."""
        infos = [info for info in self.infos() if info.serves(served.info.model_name, served.adapter)]
        return tuple(dict.fromkeys(info.hash_profile for info in infos))

    # -- sequences ----------------------------------------------------------------------------------

    def start(self, sequence: Sequence) -> None:
        self._place(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants it any more, or it is done: its engine and the tokenizer drop it at once."""
        assert self._text is not None
        self._text.drop(sequence)
        self._waiting.pop(sequence, None)
        self._show_waiting()
        link = self._homes.pop(sequence, None)
        if link is not None:
            link.abort(sequence)

    def stopped_by_text(self, sequence: Sequence) -> None:
        """A stop string matched, or its text cannot be had: the engine may stop."""
        link = self._homes.pop(sequence, None)
        self._waiting.pop(sequence, None)
        if link is None:
            return
        if sequence.error is None:
            link.finish(sequence, sequence.num_tokens)
        else:
            link.abort(sequence)

    def _place(self, sequence: Sequence) -> None:
        work = sequence.work
        candidates = {
            link.address: Candidate(link.address, link.info, link.num_inflight)
            for link in self.links
            if link.serving and link.info is not None and link.info.serves(work.model, work.adapter)
        }
        if not candidates:
            self._waiting.setdefault(sequence, time.monotonic() + self._wait_s)
            self._show_waiting()
            return
        chosen = self._router.choose(list(candidates.values()), work.prompt_ids)
        link = next(link for link in self.links if link.address == chosen.address)
        self._waiting.pop(sequence, None)
        self._show_waiting()
        self._homes[sequence] = link
        link.submit(sequence)

    # -- what links tell ----------------------------------------------------------------------------

    def on_tokens(self, sequence: Sequence) -> None:
        assert self._text is not None
        if sequence.ending is not None:
            self._homes.pop(sequence, None)
        if not sequence.done:
            self._text.push(sequence)

    def on_refused(self, sequence: Sequence, ending: Ending) -> None:
        assert self._text is not None
        assert ending.error_kind is not None
        self._homes.pop(sequence, None)
        self._text.drop(sequence)
        error = PeerError(ending.error_kind, ending.error)
        self._metrics.failed_sequences.labels(ending.error_kind.value).inc()
        sequence.fail(from_reprise_error(error, retry_after_s=ending.retry_after_s))

    def on_lost(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._homes.pop(sequence, None)
            if sequence.done:
                continue
            sequence.num_resubmissions += 1
            if sequence.num_resubmissions > self._max_resubmissions:
                self._fail(sequence, f"engines lost this request {sequence.num_resubmissions} times")
                continue
            if len(sequence.output_ids) >= sequence.work.sampling.max_tokens:
                # Only the news of its end was lost.
                sequence.ending = Ending(FinishReason.LENGTH)
                self.on_tokens(sequence)
                continue
            self._metrics.resubmissions.inc()
            self._place(sequence)

    def on_state(self, link: EngineLink) -> None:
        self._changed.set()
        self._on_state(None if self.can_serve else self._problems())
        if link.serving:
            for sequence in list(self._waiting):
                self._place(sequence)

    async def expire_forever(self) -> None:
        while True:
            now_s = time.monotonic()
            for sequence, deadline_s in list(self._waiting.items()):
                if now_s >= deadline_s:
                    del self._waiting[sequence]
                    self._fail(sequence, str(self._none_available()))
            self._show_waiting()
            await asyncio.sleep(_CHECK_INTERVAL_S)

    def _fail(self, sequence: Sequence, message: str) -> None:
        assert self._text is not None
        self._text.drop(sequence)
        self._metrics.failed_sequences.labels("unavailable").inc()
        sequence.fail(ApiError(503, message, retry_after_s=1.0))

    def _none_available(self) -> ApiError:
        return ApiError(
            503,
            f"no engine can serve; waited {self._wait_s:g} s ({self._problems()})",
            retry_after_s=1.0,
        )

    def _problems(self) -> str:
        return "; ".join(link.problem for link in self.links if link.problem)

    def _show_waiting(self) -> None:
        self._metrics.waiting_sequences.set(len(self._waiting))
