"""From a checked call to running sequences: tokens and hashes, the rules that need the model, a start."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from reprise_core.errors import ErrorKind
from reprise_core.requests import SamplingParams
from reprise_gateway.calls import GenerationCall, Prompt, SamplingFields
from reprise_gateway.errors import ApiError, bad_rule, deadline_exceeded, from_reprise_error
from reprise_gateway.fleet import Fleet, Served
from reprise_gateway.metrics import GatewayMetrics
from reprise_gateway.ports import PromptApi
from reprise_gateway.sequence import Sequence, Update, Work
from reprise_gateway.traces import RequestTraces
from reprise_wire.clients.engine import EngineInfo
from reprise_wire.clients.tokenizer import ChatPrompt, DetokenizeOpen, TokenizedPrompt
from reprise_wire.error_codec import PeerError
from reprise_wire.hash_profiles import HashRequest

_PROMPT_TAIL_TOKENS = 8
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """`at_s` is on the event loop's clock, which is the monotonic one."""

    timeout_s: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """The sequences of one request, in the order of its answers: n of the first prompt, and so on."""

    request_id: str
    created_s: int
    call: GenerationCall
    served: Served
    sequences: tuple[Sequence, ...]
    echoes: tuple[str, ...]
    """What stands before each answer's text: its prompt when echo is on."""
    deadline: Deadline | None = None

    @property
    def info(self) -> EngineInfo:
        return self.served.info


class Prompts:
    """The tokenizer's part, tried again while the tokenizer is away, up to `wait_s`."""

    def __init__(self, api: PromptApi, *, wait_s: float, retry_interval_s: float) -> None:
        self._api = api
        self._wait_s = wait_s
        self._retry_interval_s = retry_interval_s

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool, hashing: HashRequest | None = None
    ) -> TokenizedPrompt:
        api = self._api
        if isinstance(prompt, str):
            return await self._call(
                lambda: api.tokenize_text(prompt, add_special_tokens=add_special_tokens, hashing=hashing)
            )
        if isinstance(prompt, ChatPrompt):
            return await self._call(
                lambda: api.tokenize_chat(prompt, add_special_tokens=add_special_tokens, hashing=hashing)
            )
        hashes = await self._call(lambda: api.hash_tokens(prompt, hashing)) if hashing is not None else ()
        return TokenizedPrompt(list(prompt), hashes)

    async def detokenize(self, token_ids: Iterable[int]) -> str:
        return await self._call(lambda: self._api.detokenize(tuple(token_ids)))

    async def token_bytes(self, token_ids: list[int]) -> list[bytes]:
        return await self._call(lambda: self._api.token_bytes(token_ids))

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        deadline_s = time.monotonic() + self._wait_s
        while True:
            try:
                return await call()
            except PeerError as error:
                if error.kind is not ErrorKind.UNAVAILABLE or time.monotonic() >= deadline_s:
                    raise from_reprise_error(error) from error
            await asyncio.sleep(self._retry_interval_s)


class Completions:
    """Limit: `max_sequences` at the same time; a request that would exceed it gets a 429."""

    def __init__(
        self,
        fleet: Fleet,
        prompts: Prompts,
        *,
        metrics: GatewayMetrics,
        traces: RequestTraces,
        max_sequences: int,
    ) -> None:
        self.fleet = fleet
        self.prompts = prompts
        self._traces = traces
        self._metrics = metrics
        self._max_sequences = max_sequences
        self._num_sequences = 0
        self._counter = itertools.count(1)
        self._clocks: dict[str, asyncio.TimerHandle] = {}
        """Deadlines of the runs that have one, by their first sequence's id: callers may repeat theirs."""

    async def prepare(self, call: GenerationCall, request_id: str, deadline: Deadline | None = None) -> Run:
        """Nothing runs yet. Raises ApiError, a 504 when the deadline passes."""
        if deadline is None:
            return await self._prepare(call, request_id, None)
        try:
            async with asyncio.timeout_at(deadline.at_s):
                return await self._prepare(call, request_id, deadline)
        except TimeoutError:
            raise self._too_late(deadline) from None

    async def _prepare(self, call: GenerationCall, request_id: str, deadline: Deadline | None) -> Run:
        served = await self.fleet.served(call.model)
        info = served.info
        _check_max_tokens(call.sampling, info)
        hashing = HashRequest(self.fleet.profiles(served), cache_salt=call.cache_salt, lora=served.adapter)
        tokenized: list[TokenizedPrompt] = []
        for prompt in call.prompts:
            # A prompt of ids is refused before it is worked on.
            if isinstance(prompt, tuple):
                _check_prompt(prompt, call, info)
            with self._traces.tokenizing():
                one = await self.prompts.tokenize(
                    prompt, add_special_tokens=call.add_special_tokens, hashing=hashing
                )
            if not isinstance(prompt, tuple):
                _check_prompt(one.token_ids, call, info)
            tokenized.append(one)
        echoes = await self._echoes(call, tokenized)
        sequences = [
            Sequence(f"{request_id}-{next(self._counter)}", work, traceparent=self._traces.traceparent())
            for one in tokenized
            for work in _works(one, call, served, deadline)
        ]
        return Run(request_id, int(time.time()), call, served, tuple(sequences), echoes, deadline)

    async def _echoes(self, call: GenerationCall, tokenized: list[TokenizedPrompt]) -> tuple[str, ...]:
        echoes: list[str] = []
        for prompt, one in zip(call.prompts, tokenized, strict=True):
            text = ""
            if call.echo:
                text = prompt if isinstance(prompt, str) else await self.prompts.detokenize(one.token_ids)
            echoes += [text] * call.n
        return tuple(echoes)

    def start(self, run: Run) -> None:
        num = len(run.sequences)
        if self._num_sequences + num > self._max_sequences:
            self._metrics.refused_requests.labels("inflight_sequences").inc()
            raise ApiError(
                429,
                f"{self._num_sequences} sequences are being generated, {num} more would exceed the limit of"
                f" {self._max_sequences}",
                retry_after_s=1.0,
            )
        self._count(num)
        if run.deadline is not None:
            self._clocks[run.sequences[0].request_id] = asyncio.get_running_loop().call_at(
                run.deadline.at_s, self._expire, run, run.deadline
            )
        self._traces.begin(run.sequences)
        for sequence in run.sequences:
            self.fleet.start(sequence)

    def _expire(self, run: Run, deadline: Deadline) -> None:
        """Here and not only in the engine, which may be the one that is away."""
        error = self._too_late(deadline)
        for sequence in run.sequences:
            sequence.fail(error)

    def _too_late(self, deadline: Deadline) -> ApiError:
        self._metrics.deadlines.inc()
        return deadline_exceeded(deadline.timeout_s)

    def end(self, run: Run) -> None:
        """Exactly once per start, however the request ended: whatever still runs is dropped."""
        self._count(-len(run.sequences))
        clock = self._clocks.pop(run.sequences[0].request_id, None)
        if clock is not None:
            clock.cancel()
        for sequence in run.sequences:
            self.fleet.cancel(sequence)
        self._traces.end(run.sequences)

    def _count(self, by: int) -> None:
        self._num_sequences += by
        self._metrics.inflight_sequences.set(self._num_sequences)

    async def updates(self, run: Run, started_s: float) -> AsyncIterator[tuple[int, Update]]:
        """News of all sequences as it comes, each with the index of its answer. Raises ApiError."""
        pending = {
            asyncio.ensure_future(sequence.next_update()): i for i, sequence in enumerate(run.sequences)
        }
        first = True
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    i = pending.pop(task)
                    update = task.result()
                    if update.finish_reason is None:
                        pending[asyncio.ensure_future(run.sequences[i].next_update())] = i
                    if first and update.num_tokens:
                        first = False
                        self._metrics.first_token_seconds.observe(time.monotonic() - started_s)
                    yield i, update
            self._metrics.request_seconds.observe(time.monotonic() - started_s)
        finally:
            for task in pending:
                task.cancel()


def _works(
    one: TokenizedPrompt, call: GenerationCall, served: Served, deadline: Deadline | None
) -> list[Work]:
    sampling, info = call.sampling, served.info
    room = info.max_model_len - len(one.token_ids)
    params = SamplingParams(
        max_tokens=min(sampling.max_tokens or room, room),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=min(sampling.top_k, info.vocab_size),
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=call.logprobs.output,
        prompt_logprobs=call.logprobs.measured_prompt,
    )
    text = DetokenizeOpen(
        stop=sampling.stop,
        include_stop_in_text=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        prompt_tail_ids=tuple(one.token_ids[-_PROMPT_TAIL_TOKENS:]),
        min_tokens=sampling.min_tokens,
    )
    work = Work(
        model=info.model_name,
        adapter=served.adapter,
        prompt_ids=tuple(one.token_ids),
        hashes={hashes.profile_id: hashes for hashes in one.hashes},
        sampling=params,
        text=text,
        eos_token_ids=frozenset(info.eos_token_ids),
        cache_salt=call.cache_salt,
        priority=call.priority,
        deadline_s=deadline.at_s if deadline is not None else None,
        tenant=call.tenant,
        pin=call.cache_pin,
        pin_ttl_s=call.cache_pin_ttl_s,
    )
    # Answers to one prompt are to differ, also with a seed; the prompt is pinned and measured once.
    others = replace(work, pin=False, sampling=msgspec.structs.replace(params, prompt_logprobs=None))
    return [work, *(_with_seed(others, i) for i in range(1, call.n))]


def _with_seed(work: Work, i: int) -> Work:
    seed = work.sampling.seed
    if seed is None:
        return work
    return replace(work, sampling=msgspec.structs.replace(work.sampling, seed=seed + i))


def _check_max_tokens(sampling: SamplingFields, info: EngineInfo) -> None:
    if sampling.max_tokens is not None and sampling.max_tokens > info.max_model_len:
        raise bad_rule(
            sampling.max_tokens_field,
            f"{sampling.max_tokens_field}: {sampling.max_tokens}, must be at most the context length of"
            f" {info.max_model_len} tokens",
        )


def _check_prompt(token_ids: Iterable[int], call: GenerationCall, info: EngineInfo) -> None:
    field = "messages" if call.chat else "prompt"
    ids = list(token_ids)
    if not ids:
        param = None if call.chat or call.prompts_listed else "prompt"
        raise bad_rule(param, f"{field}: makes no tokens; at least one is needed")
    if len(ids) >= info.max_model_len:
        full = len(ids) == info.max_model_len
        raise bad_rule(
            "max_tokens" if full else "input_tokens",
            f"{field}: {len(ids)} tokens, the context length is {info.max_model_len} tokens and must leave"
            " room for at least one output token",
        )
    largest = max(ids)
    if largest >= info.vocab_size:
        raise bad_rule(None, f"{field}: token id {largest} is outside the vocabulary of {info.vocab_size}")
