"""The way to an engine (`reprise.v1.Engine`): one stream per gateway, info, reset, metrics.

Every failure is a `PeerError`: UNAVAILABLE means that the engine is away or has no worker yet.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from reprise.v1 import engine_pb2 as pb
from reprise.v1.engine_pb2_grpc import EngineStub
from reprise_core.errors import ErrorKind
from reprise_core.extra_keys import LoraAdapter
from reprise_core.requests import FinishReason, PromptSources, SamplingParams
from reprise_wire.error_codec import PeerError, from_rpc_error
from reprise_wire.hash_profiles import (
    HashProfile,
    ProfileHashes,
    hashes_to_proto,
    lora_from_proto,
    lora_to_proto,
    profile_from_proto,
)

T = TypeVar("T")

_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORT: FinishReason.ABORT,
    pb.FINISH_REASON_ERROR: FinishReason.ERROR,
}


@dataclass(frozen=True, slots=True)
class EngineInfo:
    engine_id: str
    model_name: str
    model_path: str
    max_model_len: int
    block_size: int
    num_blocks: int
    hash_profile: HashProfile
    model_fingerprint: str
    max_num_seqs: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    enable_prefix_caching: bool
    num_running: int
    num_waiting: int
    version: str
    adapters: tuple[LoraAdapter, ...] = ()
    """Served beside the model, with their digests."""

    def adapter(self, name: str) -> LoraAdapter | None:
        return next((adapter for adapter in self.adapters if adapter.name == name), None)

    def serves(self, model: str, adapter: LoraAdapter | None) -> bool:
        """The adapter under its name with the same content; its path and its id may be others."""
        if model != self.model_name or adapter is None:
            return model == self.model_name
        own = self.adapter(adapter.name)
        return own is not None and own.digest == adapter.digest


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as an engine takes it.

    `num_output_tokens` of `token_ids` are output of an earlier engine; indices and `max_tokens` go on
    counting from the first of them. `pin` keeps the prompt's blocks for `pin_ttl_s`, 0 = until unpinned.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    block_hashes: ProfileHashes | None = None
    cache_salt: str | None = None
    lora: LoraAdapter | None = None
    priority: int = 0
    tenant: str = ""
    timeout_s: float = 0.0
    traceparent: str = ""
    num_output_tokens: int = 0
    pin: bool = False
    pin_ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ending:
    reason: FinishReason
    stop_token_id: int | None = None
    error_kind: ErrorKind | None = None
    error: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """New output tokens of one request; the first of them has index `first_index`.

    The log-probabilities are packed rows (`reprise_core.logprobs`), empty when nobody asked: one per token,
    and with the first token one per prompt token from the second on.
    """

    request_id: str
    first_index: int
    token_ids: Sequence[int]
    sources: PromptSources | None
    ending: Ending | None
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""


@dataclass(frozen=True, slots=True)
class ResetAnswer:
    """Per tier, truthfully; `external` is None when it was not asked for."""

    device: bool
    external: bool | None


@dataclass(frozen=True, slots=True)
class PinInfo:
    """A pinned prefix; `expires_in_s` None = until it is unpinned."""

    pin_id: int
    tenant: str
    num_tokens: int
    num_blocks: int
    expires_in_s: float | None


class EngineClient:
    """`channel` is the caller's, who also closes it."""

    def __init__(self, channel: grpc.aio.Channel, *, peer: str = "engine") -> None:
        self._stub = EngineStub(channel)  # type: ignore[no-untyped-call]
        self._peer = peer

    async def info(self, *, timeout_s: float = 2.0) -> EngineInfo:
        return _info_from_proto(await self._call(self._stub.GetInfo(pb.GetInfoRequest(), timeout=timeout_s)))

    async def reset_prefix_cache(
        self, *, reset_running_requests: bool, reset_external: bool, timeout_s: float
    ) -> ResetAnswer:
        request = pb.ResetPrefixCacheRequest(
            reset_running_requests=reset_running_requests, reset_external=reset_external
        )
        message: pb.ResetPrefixCacheResponse = await self._call(
            self._stub.ResetPrefixCache(request, timeout=timeout_s)
        )
        return ResetAnswer(message.device, message.external if message.HasField("external") else None)

    async def metrics(self, *, timeout_s: float = 2.0) -> str:
        """The engine's metrics in the Prometheus text format."""
        message: pb.GetMetricsResponse = await self._call(
            self._stub.GetMetrics(pb.GetMetricsRequest(), timeout=timeout_s)
        )
        return message.text

    async def pins(self, *, timeout_s: float = 2.0) -> list[PinInfo]:
        message: pb.ListPinsResponse = await self._call(
            self._stub.ListPins(pb.ListPinsRequest(), timeout=timeout_s)
        )
        return [_pin_from_proto(pin) for pin in message.pins]

    async def unpin(self, pin_id: int, *, timeout_s: float = 2.0) -> None:
        """NOT_FOUND if there is no such pin."""
        await self._call(self._stub.Unpin(pb.UnpinRequest(pin_id=pin_id), timeout=timeout_s))

    async def attach(self, gateway_id: str, resume: Mapping[str, int], *, timeout_s: float) -> "EngineCall":
        """Opens the stream; returns once the engine has taken it. `resume`: id to next token index."""
        call = EngineCall(self._stub.Stream(), self._peer)
        try:
            await call.open(gateway_id, resume, timeout_s)
        except BaseException:
            call.cancel()
            raise
        return call

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._peer) from error


class EngineCall:
    """One open stream: requests up, one message of deltas per step down."""

    def __init__(self, call: Any, peer: str) -> None:
        self._call = call
        self._peer = peer

    async def open(self, gateway_id: str, resume: Mapping[str, int], timeout_s: float) -> None:
        points = [pb.ResumePoint(request_id=name, next_index=index) for name, index in resume.items()]
        await self._write(pb.StreamRequest(attach=pb.Attach(gateway_id=gateway_id, resume=points)))
        try:
            async with asyncio.timeout(timeout_s):
                await self._call.wait_for_connection()
        except TimeoutError:
            raise PeerError(
                ErrorKind.UNAVAILABLE, f"{self._peer}: no answer to attach in {timeout_s:g} s"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._peer) from error

    async def submit(self, submission: Submission) -> None:
        await self._write(pb.StreamRequest(submit=_submission_to_proto(submission)))

    async def abort(self, request_id: str) -> None:
        await self._write(pb.StreamRequest(abort=pb.Abort(request_id=request_id)))

    async def finish(self, request_id: str, num_output_tokens: int) -> None:
        """The caller has what it needs: tokens past `num_output_tokens` do not count."""
        message = pb.Finish(request_id=request_id, num_output_tokens=num_output_tokens)
        await self._write(pb.StreamRequest(finish=message))

    async def read(self) -> list[RequestDelta] | None:
        """The next message's deltas; None when the engine ended the stream."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._peer) from error
        if message is grpc.aio.EOF:
            return None
        return [_delta_from_proto(delta) for delta in message.deltas]

    def cancel(self) -> None:
        self._call.cancel()

    async def _write(self, message: pb.StreamRequest) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise broken_write(error, self._peer) from error


def broken_write(error: Exception, peer: str) -> PeerError:
    """A failed write has no status of its own; where the call has ended, its status tells more."""
    if isinstance(error, grpc.aio.AioRpcError) and error.code() is not grpc.StatusCode.INTERNAL:
        return from_rpc_error(error, peer)
    return PeerError(ErrorKind.UNAVAILABLE, f"{peer}: the stream broke")


def _info_from_proto(message: pb.GetInfoResponse) -> EngineInfo:
    return EngineInfo(
        engine_id=message.engine_id,
        model_name=message.model_name,
        model_path=message.model_path,
        max_model_len=message.max_model_len,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        hash_profile=profile_from_proto(message.hash_profile),
        model_fingerprint=message.model_fingerprint,
        max_num_seqs=message.max_num_seqs,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        enable_prefix_caching=message.enable_prefix_caching,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        version=message.version,
        adapters=tuple(lora_from_proto(adapter) for adapter in message.adapters),
    )


def _pin_from_proto(message: pb.Pin) -> PinInfo:
    return PinInfo(
        pin_id=message.pin_id,
        tenant=message.tenant,
        num_tokens=message.num_tokens,
        num_blocks=message.num_blocks,
        expires_in_s=message.expires_in_s if message.HasField("expires_in_s") else None,
    )


def _submission_to_proto(submission: Submission) -> pb.Submit:
    return pb.Submit(
        request_id=submission.request_id,
        token_ids=submission.token_ids,
        sampling=_sampling_to_proto(submission.sampling),
        block_hashes=hashes_to_proto(submission.block_hashes) if submission.block_hashes else None,
        cache_salt=submission.cache_salt or "",
        lora=lora_to_proto(submission.lora) if submission.lora is not None else None,
        priority=submission.priority,
        tenant=submission.tenant,
        timeout_s=submission.timeout_s,
        traceparent=submission.traceparent,
        num_output_tokens=submission.num_output_tokens,
        pin=submission.pin,
        pin_ttl_s=submission.pin_ttl_s,
    )


def _sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def _delta_from_proto(message: pb.RequestDelta) -> RequestDelta:
    return RequestDelta(
        request_id=message.request_id,
        first_index=message.first_index,
        token_ids=message.token_ids,
        sources=_sources_from_proto(message.prompt_usage) if message.HasField("prompt_usage") else None,
        ending=_ending_from_proto(message.finished) if message.HasField("finished") else None,
        logprobs=message.logprobs,
        prompt_logprobs=message.prompt_logprobs,
    )


def _sources_from_proto(message: pb.PromptUsage) -> PromptSources:
    return PromptSources(
        prompt_tokens=message.prompt_tokens,
        device=message.device_tokens,
        host=message.host_tokens,
        disk=message.disk_tokens,
        external=message.external_tokens,
    )


def _ending_from_proto(message: pb.Finished) -> Ending:
    reason = _REASONS.get(message.reason, FinishReason.ERROR)
    kind = _error_kind(message.error.kind) if reason is FinishReason.ERROR else None
    return Ending(
        reason=reason,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        error_kind=kind,
        error=message.error.message,
        retry_after_s=message.error.retry_after_s,
    )


def _error_kind(text: str) -> ErrorKind:
    try:
        return ErrorKind(text)
    except ValueError:
        return ErrorKind.INTERNAL
