"""An engine without a model, behind the real `reprise.v1.Engine`: deterministic tokens, faults on order.

It keeps the contract that gateways rely on: requests of a broken stream live on for a grace period and
are repeated from the index that is asked for; unknown ones end with `not_found`; indices go on counting
where an earlier engine stopped; a repeated id is ignored.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from reprise.v1 import common_pb2
from reprise.v1 import engine_pb2 as pb
from reprise.v1.engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server
from reprise_core.errors import NotFound, Unavailable
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.logprobs import TokenLogprobs
from reprise_core.none_hash import FIXED_SEED_TEXT, none_hash
from reprise_runtime.grpc_server import GrpcServer
from support.logprob_rows import pack_row

TokenScript = Callable[[Sequence[int], int], int]
"""Token ids so far (prompt and output) and the output index, to the next token."""


def counting_tokens(token_ids: Sequence[int], index: int) -> int:
    """A function of everything before it, as a model's greedy choice is."""
    return 300 + (sum(token_ids) * 31 + len(token_ids) * 7) % 90


def best_of_neighbours(position: int, token_id: int, num_top: int) -> TokenLogprobs:
    """The token is the best; those that follow it in the vocabulary are the next."""
    value = -(position % 16) / 8
    ids = tuple(token_id + i for i in range(num_top))
    return TokenLogprobs(value, 1, ids, tuple(value - i for i in range(num_top)))


@dataclass
class FakeRequest:
    submit: pb.Submit
    output_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finished: pb.Finished | None = None
    gone: bool = False

    @property
    def prompt_ids(self) -> list[int]:
        ids = list(self.submit.token_ids)
        return ids[: len(ids) - self.submit.num_output_tokens]


@dataclass(eq=False)
class _Attachment:
    gateway_id: str
    next_index: dict[str, int]
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ended: set[str] = field(default_factory=set)
    broken: bool = False


class FakeEngine(EngineServicer):
    """Settings may be changed at any time; `submits`, `aborts` and `finishes` record what came."""

    def __init__(
        self,
        *,
        engine_id: str = "engine-0",
        model_name: str = "smollm2",
        max_model_len: int = 2048,
        vocab_size: int = 49152,
        block_size: int = 32,
        eos_token_ids: Sequence[int] = (2,),
        script: TokenScript = counting_tokens,
        token_interval_s: float = 0.0,
        tokens_per_message: int = 1,
    ) -> None:
        self.engine_id = engine_id
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.script = script
        self.logprobs: Callable[[int, int, int], TokenLogprobs] | None = best_of_neighbours
        """Position, token and number of others; None = an engine that knows nothing of log-probabilities."""
        self.token_interval_s = token_interval_s
        self.tokens_per_message = tokens_per_message
        self.has_worker = True
        self.hold = asyncio.Event()
        self.hold.set()
        self.reset_answer = pb.ResetPrefixCacheResponse(device=True)
        self.refuse: pb.ErrorDetail | None = None
        self.metrics_text = (
            "# HELP vllm:num_requests_running Requests running\n"
            "# TYPE vllm:num_requests_running gauge\n"
            f'vllm:num_requests_running{{engine="{engine_id}"}} 0.0\n'
        )
        self.pins: list[pb.Pin] = []
        self.adapters: list[common_pb2.LoraAdapter] = []
        self.submits: list[pb.Submit] = []
        self.aborts: list[str] = []
        self.finishes: list[pb.Finish] = []
        self.resets: list[pb.ResetPrefixCacheRequest] = []
        self.num_attached = 0
        self.requests: dict[str, FakeRequest] = {}
        self._seen_blocks: set[bytes] = set()
        self._attachments: list[_Attachment] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: GrpcServer | None = None

    # -- life and faults ------------------------------------------------------------------------------

    async def start(self, address: str) -> None:
        self._server = GrpcServer(
            address,
            services=["reprise.v1.Engine"],
            add=lambda server: add_EngineServicer_to_server(self, server),  # type: ignore[no-untyped-call]
        )
        await self._server.start()

    async def stop(self) -> None:
        self.break_streams()
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            await self._server.stop(0)

    def break_streams(self) -> None:
        """Every stream ends; requests go on."""
        for attachment in self._attachments:
            attachment.broken = True
            attachment.wake.set()

    def forget_requests(self) -> None:
        """As a restarted process would."""
        for request in self.requests.values():
            request.gone = True
        self.requests.clear()
        self.break_streams()

    # -- the service ------------------------------------------------------------------------------------

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        if not self.has_worker:
            raise Unavailable("no worker has registered")
        root = none_hash(HashAlgorithm.SHA256, FIXED_SEED_TEXT)
        return pb.GetInfoResponse(
            engine_id=self.engine_id,
            model_name=self.model_name,
            model_path="/models/fake",
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=1024,
            hash_profile=common_pb2.HashProfile(
                id="fake-profile", algorithm="sha256", hash_block_size=self.block_size, none_hash=root
            ),
            model_fingerprint="f" * 32,
            max_num_seqs=128,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            enable_prefix_caching=True,
            version="0.1.0",
            adapters=self.adapters,
        )

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Any
    ) -> pb.ResetPrefixCacheResponse:
        self.resets.append(request)
        self._seen_blocks.clear()
        return self.reset_answer

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        return pb.GetMetricsResponse(text=self.metrics_text)

    async def ListPins(self, request: pb.ListPinsRequest, context: Any) -> pb.ListPinsResponse:
        return pb.ListPinsResponse(pins=self.pins)

    async def Unpin(self, request: pb.UnpinRequest, context: Any) -> pb.UnpinResponse:
        left = [pin for pin in self.pins if pin.pin_id != request.pin_id]
        if len(left) == len(self.pins):
            raise NotFound(f"there is no pin {request.pin_id}")
        self.pins = left
        return pb.UnpinResponse()

    async def Stream(
        self, request_iterator: AsyncIterator[pb.StreamRequest], context: Any
    ) -> AsyncIterator[pb.StreamResponse]:
        first = await anext(aiter(request_iterator))
        attachment = _Attachment(
            first.attach.gateway_id, {point.request_id: point.next_index for point in first.attach.resume}
        )
        for request_id in [name for name in self.requests if name not in attachment.next_index]:
            self._drop(request_id)
        self._attachments.append(attachment)
        self.num_attached += 1
        reader = asyncio.ensure_future(self._read(request_iterator, attachment))
        try:
            await context.send_initial_metadata(())
            while not attachment.broken:
                deltas = self._deltas(attachment)
                if not deltas:
                    await attachment.wake.wait()
                    attachment.wake.clear()
                else:
                    yield pb.StreamResponse(deltas=deltas)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "stream broken on order")
        finally:
            reader.cancel()
            self._attachments.remove(attachment)

    async def _read(self, requests: AsyncIterator[pb.StreamRequest], attachment: _Attachment) -> None:
        async for message in requests:
            kind = message.WhichOneof("kind")
            if kind == "submit":
                self._submit(message.submit, attachment)
            elif kind == "abort":
                self.aborts.append(message.abort.request_id)
                self._drop(message.abort.request_id)
            elif kind == "finish":
                self.finishes.append(message.finish)
                self._drop(message.finish.request_id)

    def _submit(self, submit: pb.Submit, attachment: _Attachment) -> None:
        self.submits.append(submit)
        if submit.request_id in self.requests:
            return
        request = FakeRequest(submit)
        ids = list(submit.token_ids)
        request.output_ids = ids[len(ids) - submit.num_output_tokens :]
        self.requests[submit.request_id] = request
        attachment.next_index[submit.request_id] = submit.num_output_tokens
        if self.refuse is not None:
            request.finished = pb.Finished(reason=pb.FINISH_REASON_ERROR, error=self.refuse)
            self._wake()
            return
        request.cached_tokens = self._look_up(request)
        task = asyncio.ensure_future(self._generate(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _look_up(self, request: FakeRequest) -> int:
        """Hits by the hashes that came with the request, under the cap of all but one token."""
        digests = request.submit.block_hashes.digests
        hashes = [digests[i : i + 32] for i in range(0, len(digests), 32)]
        num_usable = (len(request.submit.token_ids) - 1) // self.block_size
        hits = 0
        for one in hashes[:num_usable]:
            if one not in self._seen_blocks:
                break
            hits += 1
        self._seen_blocks.update(hashes)
        return hits * self.block_size

    async def _generate(self, request: FakeRequest) -> None:
        sampling = request.submit.sampling
        prompt = request.prompt_ids
        while not request.gone:
            await self.hold.wait()
            for _ in range(self.tokens_per_message):
                index = len(request.output_ids)
                token = self.script([*prompt, *request.output_ids], index)
                request.output_ids.append(token)
                request.finished = self._ending(token, index + 1, sampling)
                if request.finished is not None:
                    break
            self._wake()
            if request.finished is not None:
                return
            await asyncio.sleep(self.token_interval_s)

    def _ending(self, token: int, num_tokens: int, sampling: pb.SamplingParams) -> pb.Finished | None:
        if num_tokens >= sampling.min_tokens:
            ends = token in self.eos_token_ids and not sampling.ignore_eos
            if ends or token in sampling.stop_token_ids:
                return pb.Finished(reason=pb.FINISH_REASON_STOP, stop_token_id=token)
        if num_tokens >= sampling.max_tokens:
            return pb.Finished(reason=pb.FINISH_REASON_LENGTH)
        return None

    def _drop(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        if request is not None:
            request.gone = True

    def _wake(self) -> None:
        for attachment in self._attachments:
            attachment.wake.set()

    def _deltas(self, attachment: _Attachment) -> list[pb.RequestDelta]:
        deltas = []
        for request_id, index in attachment.next_index.items():
            if request_id in attachment.ended:
                continue
            request = self.requests.get(request_id)
            if request is None:
                attachment.ended.add(request_id)
                error = pb.ErrorDetail(kind="not_found", message="unknown request")
                finished = pb.Finished(reason=pb.FINISH_REASON_ERROR, error=error)
                deltas.append(pb.RequestDelta(request_id=request_id, first_index=index, finished=finished))
                continue
            tokens = request.output_ids[index:]
            if not tokens and request.finished is None:
                continue
            if request.finished is not None:
                attachment.ended.add(request_id)
            deltas.append(self._delta(request_id, request, index, tokens))
            attachment.next_index[request_id] = index + len(tokens)
        return deltas

    def _delta(self, request_id: str, request: FakeRequest, index: int, tokens: list[int]) -> pb.RequestDelta:
        usage = pb.PromptUsage(prompt_tokens=len(request.prompt_ids), device_tokens=request.cached_tokens)
        return pb.RequestDelta(
            request_id=request_id,
            first_index=index,
            token_ids=tokens,
            prompt_usage=usage,
            finished=request.finished,
            **self._logprobs(request, index, tokens),
        )

    def _logprobs(self, request: FakeRequest, index: int, tokens: list[int]) -> dict[str, bytes]:
        sampling, prompt = request.submit.sampling, request.prompt_ids
        rows: dict[str, bytes] = {}
        if self.logprobs is None:
            return rows
        if sampling.HasField("logprobs"):
            first = len(prompt) + index
            made = (self.logprobs(first + i, token, sampling.logprobs) for i, token in enumerate(tokens))
            rows["logprobs"] = b"".join(map(pack_row, made))
        if sampling.HasField("prompt_logprobs") and index == 0 and tokens:
            num_top = sampling.prompt_logprobs
            made = (self.logprobs(i, prompt[i], num_top) for i in range(1, len(prompt)))
            rows["prompt_logprobs"] = b"".join(map(pack_row, made))
        return rows
