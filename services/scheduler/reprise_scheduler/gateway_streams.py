"""Gateways and their requests: one outbox each, merged when its stream is slow or away.

After a break a gateway's requests go on for a grace period; it attaches again with the next token
index that it wants of each, and what it missed is sent again from the requests' own tokens. A
finished request is kept for the same time, so that its end can be repeated.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from reprise_core.errors import RepriseError
from reprise_core.requests import FinishReason, PromptSources
from reprise_scheduler.metrics import StreamMetrics
from reprise_scheduler.sched.outputs import Output
from reprise_scheduler.sched.request import Request

MAX_LOGPROB_BYTES = 8 * 1024 * 1024
"""Log-probabilities in one message; the delta that exceeds it is the last in it."""


@dataclass(slots=True)
class Ending:
    reason: FinishReason
    stop_token_id: int | None = None
    error_kind: str = ""
    error: str = ""
    retry_after_s: float = 0.0


@dataclass(slots=True)
class Delta:
    """What one gateway is told of one request; later deltas are merged into an unsent one."""

    request_id: str
    first_index: int
    token_ids: list[int]
    sources: PromptSources | None = None
    ending: Ending | None = None
    logprobs: "DeltaLogprobs | None" = None
    """None for a request that did not ask for any."""


@dataclass(slots=True)
class DeltaLogprobs:
    """Packed rows of a delta's tokens, and with the first of them the prompt's."""

    output: bytearray
    prompt: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.output) + len(self.prompt)


@dataclass(slots=True)
class OwnedRequest:
    """A request as its gateway knows it."""

    gateway: "Gateway"
    client_request_id: str
    request: Request | None = None
    """None while its prompt is being hashed."""
    ending: Ending | None = None
    cancelled: bool = False
    deadline: asyncio.TimerHandle | None = None

    def stop_clock(self) -> None:
        """It has ended: its deadline means nothing any more."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


@dataclass(slots=True, eq=False)
class Gateway:
    gateway_id: str
    owned: dict[str, OwnedRequest] = field(default_factory=dict)
    outbox: dict[str, Delta] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    stream: object | None = None
    """Token of the attached stream; a newer one takes its place."""
    grace: asyncio.TimerHandle | None = None


class GatewayStreams:
    """Limits: a gateway's outbox holds at most one delta per request of its own."""

    def __init__(self, metrics: StreamMetrics, *, grace_s: float, abort: Callable[[Request], None]) -> None:
        self._metrics = metrics
        self._grace_s = grace_s
        self._abort = abort
        self._gateways: dict[str, Gateway] = {}

    # -- streams --------------------------------------------------------------------------------

    def attach(self, gateway_id: str, resume: Mapping[str, int]) -> tuple[Gateway, object]:
        """`resume`: request id to the next token index wanted. Requests not named are aborted."""
        gateway = self._gateways.setdefault(gateway_id, Gateway(gateway_id))
        if gateway.grace is not None:
            gateway.grace.cancel()
            gateway.grace = None
        gateway.stream = token = object()
        gateway.outbox.clear()
        gateway.wake.set()
        for request_id in [name for name in gateway.owned if name not in resume]:
            self.abort(gateway, request_id)
        for request_id, next_index in resume.items():
            self._resend(gateway, request_id, next_index)
        self._metrics.gateways.set(sum(one.stream is not None for one in self._gateways.values()))
        return gateway, token

    def detach(self, gateway: Gateway, token: object) -> None:
        """The stream ended; a newer one may have taken over already."""
        self._metrics.breaks.inc()
        if gateway.stream is not token:
            return
        gateway.stream = None
        loop = asyncio.get_running_loop()
        gateway.grace = loop.call_later(self._grace_s, self._give_up, gateway)
        self._metrics.gateways.set(sum(one.stream is not None for one in self._gateways.values()))

    def _give_up(self, gateway: Gateway) -> None:
        for request_id, owned in list(gateway.owned.items()):
            if owned.ending is None:
                self._metrics.grace_aborts.inc()
            self.abort(gateway, request_id)
        self._gateways.pop(gateway.gateway_id, None)

    async def next_deltas(self, gateway: Gateway, token: object) -> list[Delta] | None:
        """Waits for news; None when another stream has taken over."""
        while gateway.stream is token:
            if gateway.outbox:
                return _take_message(gateway.outbox)
            gateway.wake.clear()
            await gateway.wake.wait()
        return None

    @property
    def all_taken(self) -> bool:
        """Whether every stream has taken what was there for it; gateways are few."""
        return not any(one.outbox for one in self._gateways.values() if one.stream is not None)

    # -- requests -------------------------------------------------------------------------------

    def open(self, gateway: Gateway, client_request_id: str) -> OwnedRequest | None:
        """None when the gateway has a request of that id already."""
        if client_request_id in gateway.owned:
            return None
        owned = OwnedRequest(gateway, client_request_id)
        gateway.owned[client_request_id] = owned
        return owned

    def abort(self, gateway: Gateway, client_request_id: str) -> None:
        owned = gateway.owned.pop(client_request_id, None)
        gateway.outbox.pop(client_request_id, None)
        if owned is not None:
            owned.cancelled = True
            owned.stop_clock()
            if owned.request is not None and owned.ending is None:
                self._abort(owned.request)

    def fail(self, owned: OwnedRequest, error: RepriseError) -> None:
        """The request ends with an error that the caller is told, unless it has ended: its deadline may
        pass while it is being hashed, which then fails as well."""
        if owned.ending is not None:
            return
        index = owned.request.num_output_tokens if owned.request is not None else 0
        ending = Ending(
            FinishReason.ERROR,
            error_kind=error.kind.value,
            error=str(error),
            retry_after_s=error.retry_after_s,
        )
        self._push(owned, Delta(owned.client_request_id, index, [], ending=ending))

    def deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            owned = output.request.owner
            assert isinstance(owned, OwnedRequest)
            if owned.cancelled:
                continue
            delta = Delta(owned.client_request_id, output.first_index, list(output.token_ids))
            if output.request.logprobs is not None:
                delta.logprobs = DeltaLogprobs(bytearray(output.logprobs), output.prompt_logprobs)
            if output.token_ids and output.first_index == 0:
                delta.sources = output.request.prompt_sources
            if output.finish_reason is not None:
                delta.ending = Ending(
                    output.finish_reason, output.stop_token_id, output.error_kind, output.error
                )
                delta.sources = output.request.prompt_sources
            self._push(owned, delta)

    def _push(self, owned: OwnedRequest, delta: Delta) -> None:
        gateway = owned.gateway
        if delta.ending is not None:
            owned.ending = delta.ending
            owned.stop_clock()
            asyncio.get_running_loop().call_later(self._grace_s, self._forget, owned)
        if gateway.stream is None:
            return  # told again from the request's own tokens when the gateway is back
        unsent = gateway.outbox.get(delta.request_id)
        if unsent is None:
            gateway.outbox[delta.request_id] = delta
        else:
            self._metrics.merged.inc()
            unsent.token_ids += delta.token_ids
            unsent.sources = unsent.sources or delta.sources
            if unsent.logprobs is not None and delta.logprobs is not None:
                unsent.logprobs.output += delta.logprobs.output
            unsent.ending = delta.ending
        gateway.wake.set()

    def _forget(self, owned: OwnedRequest) -> None:
        if owned.gateway.owned.get(owned.client_request_id) is owned:
            del owned.gateway.owned[owned.client_request_id]

    def _resend(self, gateway: Gateway, client_request_id: str, next_index: int) -> None:
        owned = gateway.owned.get(client_request_id)
        if owned is None:
            ending = Ending(FinishReason.ERROR, error_kind="not_found", error="unknown request")
            gateway.outbox[client_request_id] = Delta(client_request_id, next_index, [], ending=ending)
            return
        request = owned.request
        if request is None:
            return
        tokens = request.token_ids[request.num_prompt_tokens + next_index :]
        if tokens or owned.ending is not None:
            delta = Delta(client_request_id, next_index, list(tokens), request.prompt_sources, owned.ending)
            if request.logprobs is not None:
                prompt_rows = bytes(request.logprobs.prompt) if next_index == 0 else b""
                delta.logprobs = DeltaLogprobs(request.logprobs.output_from(next_index), prompt_rows)
            gateway.outbox[client_request_id] = delta


def _take_message(outbox: dict[str, Delta]) -> list[Delta]:
    """All unsent deltas, or the first of them whose log-probabilities fill a message."""
    num_bytes = 0
    deltas = list(outbox.values())
    for count, delta in enumerate(deltas, start=1):
        if delta.logprobs is not None:
            num_bytes += delta.logprobs.num_bytes
            if num_bytes > MAX_LOGPROB_BYTES:
                del deltas[count:]
                break
    if len(deltas) == len(outbox):
        outbox.clear()
    else:
        for delta in deltas:
            del outbox[delta.request_id]
    return deltas
