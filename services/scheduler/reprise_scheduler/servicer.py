"""gRPC in: `reprise.v1.Engine`. Decode, call, encode."""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from reprise.v1 import engine_pb2 as pb
from reprise.v1.engine_pb2_grpc import EngineServicer
from reprise_core.errors import DeadlineExceeded, InvalidInput, NotFound, RepriseError
from reprise_core.extra_keys import HashInputs, LoraAdapter
from reprise_core.ids import RequestId
from reprise_core.logprobs import MAX_LOGPROBS, MAX_PROMPT_LOGPROB_BYTES, row_nbytes
from reprise_core.requests import FinishReason, PromptSources, SamplingParams
from reprise_scheduler.engine_loop import EngineLoop
from reprise_scheduler.gateway_streams import Delta, Ending, Gateway, GatewayStreams, OwnedRequest
from reprise_scheduler.kv_cache.pins import Pin
from reprise_scheduler.metrics import StreamMetrics
from reprise_scheduler.probe import Mark, Probe
from reprise_scheduler.request_traces import RequestTraces
from reprise_scheduler.sched.request import Request
from reprise_scheduler.sched.served_adapters import served_adapter, still_served
from reprise_scheduler.settings import SchedulerSettings
from reprise_wire.clients.tokenizer import TokenizerClient
from reprise_wire.hash_profiles import HashRequest, lora_from_proto, lora_to_proto, profile_to_proto

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


class EngineRpc(EngineServicer):
    def __init__(
        self,
        settings: SchedulerSettings,
        loop: EngineLoop,
        streams: GatewayStreams,
        hasher: TokenizerClient,
        metrics: StreamMetrics,
        registry: CollectorRegistry,
        probe: Probe,
        traces: RequestTraces,
        *,
        version: str,
    ) -> None:
        self._probe = probe
        self._traces = traces
        self._settings = settings
        self._loop = loop
        self._streams = streams
        self._hasher = hasher
        self._metrics = metrics
        self._registry = registry
        self._version = version
        self._sequence = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    # -- the stream -----------------------------------------------------------------------------

    async def Stream(
        self, request_iterator: AsyncIterator[pb.StreamRequest], context: Any
    ) -> AsyncIterator[pb.StreamResponse]:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("kind") != "attach" or not first.attach.gateway_id:
            raise InvalidInput("attach", "the first message of a stream must attach and name its gateway_id")
        resume = {point.request_id: point.next_index for point in first.attach.resume}
        gateway, token = self._streams.attach(first.attach.gateway_id, resume)
        reader = asyncio.create_task(self._read(request_iterator, gateway))
        try:
            # The client learns at once that it is attached.
            await context.send_initial_metadata(())
            while (deltas := await self._streams.next_deltas(gateway, token)) is not None:
                response = pb.StreamResponse(deltas=[_delta_to_proto(delta) for delta in deltas])
                if self._streams.all_taken:
                    self._probe.mark(Mark.HANDED_OVER)
                yield response
        finally:
            reader.cancel()
            self._streams.detach(gateway, token)

    async def _read(self, requests: AsyncIterator[pb.StreamRequest], gateway: Gateway) -> None:
        async for message in requests:
            kind = message.WhichOneof("kind")
            if kind == "submit":
                self._submit(gateway, message.submit)
            elif kind == "abort":
                self._streams.abort(gateway, message.abort.request_id)
            elif kind == "finish":
                self._finish(gateway, message.finish)

    def _finish(self, gateway: Gateway, message: pb.Finish) -> None:
        owned = gateway.owned.pop(message.request_id, None)
        if owned is not None and owned.request is not None:
            owned.cancelled = True
            owned.stop_clock()
            self._loop.finish(owned.request, FinishReason.STOP, num_output_tokens=message.num_output_tokens)

    def _submit(self, gateway: Gateway, message: pb.Submit) -> None:
        owned = self._streams.open(gateway, message.request_id)
        if owned is None:
            return  # repeated after a re-attach: the request is here already
        try:
            self._accept(owned, message)
        except RepriseError as error:
            self._streams.fail(owned, error)

    def _accept(self, owned: OwnedRequest, message: pb.Submit) -> None:
        self._loop.require_scheduler()
        profile = self._loop.profile
        assert profile is not None
        _check(message, self._loop)
        _check_pin(message, self._settings)
        if message.timeout_s > 0:
            owned.deadline = asyncio.get_running_loop().call_later(
                message.timeout_s, self._expire, owned, message.timeout_s
            )
        lora = self._served(message)
        # Hashes of an adapter are of its path, too: who does not name it cannot have them.
        same_inputs = lora is None or message.lora.path == lora.path
        if message.block_hashes.profile_id == profile.profile_id and same_inputs:
            self._enqueue(owned, message, profile.split(message.block_hashes.digests), lora)
        else:
            self._metrics.rehashed.inc()
            task = asyncio.create_task(self._hash_and_enqueue(owned, message, lora))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _served(self, message: pb.Submit) -> LoraAdapter | None:
        """The adapter that is asked for, as the worker has it. Raises InvalidInput."""
        if not message.HasField("lora"):
            return None
        assert self._loop.model is not None
        return served_adapter(lora_from_proto(message.lora), self._loop.model.adapters)

    async def _hash_and_enqueue(
        self, owned: OwnedRequest, message: pb.Submit, lora: LoraAdapter | None
    ) -> None:
        profile = self._loop.profile
        assert profile is not None
        try:
            hashing = HashRequest((profile,), message.cache_salt or None, lora)
            with self._traces.hashing(message.traceparent):
                answer = await self._hasher.hash_tokens(message.token_ids, hashing)
            if not owned.cancelled and owned.ending is None:
                if lora is not None:  # the worker may have been another's meanwhile
                    lora = still_served(lora, self._loop.model.adapters if self._loop.model else ())
                self._enqueue(owned, message, profile.split(answer[0].digests if answer else b""), lora)
        except RepriseError as error:
            self._streams.fail(owned, error)

    def _enqueue(
        self, owned: OwnedRequest, message: pb.Submit, hashes: list[Any], lora: LoraAdapter | None
    ) -> None:
        hasher = self._loop.hasher
        assert hasher is not None
        salt = message.cache_salt or None
        token_ids = list(message.token_ids)
        chain = hasher.resume(token_ids, hashes, HashInputs(lora=lora, cache_salt=salt))
        sequence = next(self._sequence)
        request = Request(
            request_id=RequestId(f"{message.request_id}-{sequence}"),
            owner=owned,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids) - message.num_output_tokens,
            sampling=_sampling(message.sampling),
            chain=chain,
            arrival_s=time.monotonic(),
            sequence=sequence,
            priority=message.priority,
            tenant=message.tenant,
            cache_salt=salt,
            lora=lora,
            pin=message.pin,
            pin_ttl_s=message.pin_ttl_s,
        )
        self._loop.submit(request)
        owned.request = request
        if message.traceparent:
            self._traces.begin(request, message.traceparent)

    def _expire(self, owned: OwnedRequest, timeout_s: float) -> None:
        """Wherever the request is: being hashed, waiting, or in a step, which is executed as sent."""
        self._metrics.deadlines.inc()
        if owned.request is not None:
            self._loop.finish(owned.request, FinishReason.ERROR)
        self._streams.fail(owned, DeadlineExceeded(f"not finished within {timeout_s:g} s"))

    # -- unary ----------------------------------------------------------------------------------

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        scheduler = self._loop.require_scheduler()
        model, capacity, profile = self._loop.model, self._loop.capacity, self._loop.profile
        assert model is not None
        assert capacity is not None
        assert profile is not None
        return pb.GetInfoResponse(
            engine_id=self._settings.engine_id,
            model_name=model.name,
            model_path=model.path,
            max_model_len=scheduler.config.max_model_len,
            block_size=capacity.block_size,
            num_blocks=capacity.num_blocks,
            hash_profile=profile_to_proto(profile),
            model_fingerprint=model.fingerprint,
            max_num_seqs=scheduler.config.max_num_seqs,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            enable_prefix_caching=self._settings.enable_prefix_caching,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            version=self._version,
            adapters=[lora_to_proto(adapter) for adapter in model.adapters],
        )

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Any
    ) -> pb.ResetPrefixCacheResponse:
        device, external = await self._loop.reset_prefix_cache(
            preempt_running=request.reset_running_requests, reset_external=request.reset_external
        )
        return pb.ResetPrefixCacheResponse(device=device, external=external)

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        self._loop.refresh_metrics()
        return pb.GetMetricsResponse(text=generate_latest(self._registry).decode())

    async def ListPins(self, request: pb.ListPinsRequest, context: Any) -> pb.ListPinsResponse:
        now_s = time.monotonic()
        return pb.ListPinsResponse(pins=[_pin_to_proto(pin, now_s) for pin in self._loop.pins()])

    async def Unpin(self, request: pb.UnpinRequest, context: Any) -> pb.UnpinResponse:
        if not self._loop.unpin(request.pin_id):
            raise NotFound(f"there is no pin {request.pin_id}")
        return pb.UnpinResponse()


# -- wire to values and back ----------------------------------------------------------------------


def _check(message: pb.Submit, loop: EngineLoop) -> None:
    assert loop.model is not None
    if not message.request_id:
        raise InvalidInput("request_id", "is empty")
    if not message.token_ids:
        raise InvalidInput("token_ids", "is empty; at least one token is needed")
    if message.num_output_tokens >= len(message.token_ids):
        raise InvalidInput("num_output_tokens", f"{message.num_output_tokens} leave no prompt")
    largest = max(message.token_ids)
    if largest >= loop.model.vocab_size:
        raise InvalidInput("token_ids", f"{largest} is outside the vocabulary of {loop.model.vocab_size}")
    if not 0 <= message.timeout_s < math.inf:
        raise InvalidInput("timeout_s", f"{message.timeout_s}, must be 0 (none) or a positive number")
    sampling = message.sampling
    if sampling.max_tokens < 1:
        raise InvalidInput("max_tokens", f"{sampling.max_tokens}, must be at least 1")
    if not sampling.temperature >= 0:
        raise InvalidInput("temperature", f"{sampling.temperature}, must be 0 or more")
    if sampling.temperature > 0 and not 0 < sampling.top_p <= 1:
        raise InvalidInput("top_p", f"{sampling.top_p}, must be above 0 and at most 1")
    _check_logprobs(message, min(MAX_LOGPROBS, loop.model.vocab_size))


def _check_logprobs(message: pb.Submit, most: int) -> None:
    sampling = message.sampling
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if count > most:
            raise InvalidInput(name, f"{count}, must be at most {most}")
    if not sampling.HasField("prompt_logprobs"):
        return
    if message.num_output_tokens:
        raise InvalidInput("prompt_logprobs", "not allowed for a request that has output tokens already")
    num_bytes = len(message.token_ids) * row_nbytes(sampling.prompt_logprobs)
    if num_bytes > MAX_PROMPT_LOGPROB_BYTES:
        raise InvalidInput(
            "prompt_logprobs",
            f"{sampling.prompt_logprobs} for {len(message.token_ids)} tokens make {num_bytes} bytes, at most"
            f" {MAX_PROMPT_LOGPROB_BYTES} are allowed",
        )


def _check_pin(message: pb.Submit, settings: SchedulerSettings) -> None:
    """In the words of HTTP callers, who are the ones to read it."""
    if not 0 <= message.pin_ttl_s < math.inf:
        raise InvalidInput("cache_pin_ttl_s", f"{message.pin_ttl_s}, must be 0 (no limit) or more")
    if message.pin and not settings.max_pinned_blocks:
        raise InvalidInput("cache_pin", "true, but this engine pins nothing: its max_pinned_blocks is 0")


def _sampling(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        seed=message.seed if message.HasField("seed") else None,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def _delta_to_proto(delta: Delta) -> pb.RequestDelta:
    message = pb.RequestDelta(
        request_id=delta.request_id,
        first_index=delta.first_index,
        token_ids=delta.token_ids,
        prompt_usage=_usage(delta.sources) if delta.sources is not None else None,
        finished=_finished(delta.ending) if delta.ending is not None else None,
    )
    if delta.logprobs is not None:
        message.logprobs = bytes(delta.logprobs.output)
        message.prompt_logprobs = delta.logprobs.prompt
    return message


def _pin_to_proto(pin: Pin, now_s: float) -> pb.Pin:
    return pb.Pin(
        pin_id=pin.pin_id,
        tenant=pin.tenant,
        num_tokens=pin.num_tokens,
        num_blocks=len(pin.block_ids),
        expires_in_s=None if pin.expires_at is None else max(pin.expires_at - now_s, 0.0),
    )


def _usage(sources: PromptSources) -> pb.PromptUsage:
    return pb.PromptUsage(
        prompt_tokens=sources.prompt_tokens,
        device_tokens=sources.device,
        host_tokens=sources.host,
        disk_tokens=sources.disk,
        external_tokens=sources.external,
    )


def _finished(ending: Ending) -> pb.Finished:
    error = None
    if ending.error_kind:
        error = pb.ErrorDetail(
            kind=ending.error_kind, message=ending.error, retry_after_s=ending.retry_after_s
        )
    return pb.Finished(reason=_REASONS[ending.reason], stop_token_id=ending.stop_token_id, error=error)
