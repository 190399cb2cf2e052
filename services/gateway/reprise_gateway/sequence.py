"""One sequence being generated: tokens from an engine, text from the tokenizer, news for the client."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from reprise_core.extra_keys import LoraAdapter
from reprise_core.logprobs import row_nbytes
from reprise_core.requests import FinishReason, PromptSources, SamplingParams
from reprise_gateway.errors import ApiError
from reprise_wire.clients.engine import Ending, RequestDelta
from reprise_wire.clients.tokenizer import DetokenizeOpen, TextDelta
from reprise_wire.hash_profiles import ProfileHashes


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be generated. Token ids and hashes are of the prompt."""

    model: str
    prompt_ids: tuple[int, ...]
    hashes: Mapping[str, ProfileHashes]
    """By profile id."""
    sampling: SamplingParams
    text: DetokenizeOpen
    eos_token_ids: frozenset[int]
    adapter: LoraAdapter | None = None
    """As the prompt was hashed with it. Only engines with the same content are to serve it."""
    cache_salt: str | None = None
    priority: int = 0
    deadline_s: float | None = None
    """On the monotonic clock; engines are told the time that remains."""
    tenant: str = ""
    pin: bool = False
    pin_ttl_s: float = 0.0
    """0 = until unpinned."""

    @property
    def adapter_digest(self) -> str:
        return self.adapter.digest if self.adapter is not None else ""


@dataclass(frozen=True, slots=True)
class Update:
    """Text since the last update; `num_tokens` is the output so far. `finish_reason` on the last one."""

    text: str
    num_tokens: int
    finish_reason: str | None
    stop_reason: str | int | None


class OutOfStep(Exception):
    """An engine's delta begins after the next token that we want."""


@dataclass(eq=False, slots=True)
class Sequence:
    """Its state, and a mailbox that merges what its reader has not taken yet.

    Invariants: `output_ids` grows by exactly the engine's tokens, each index once; no more than
    `num_sent` of them are with the tokenizer; nothing changes once `done`.
    """

    request_id: str
    work: Work
    output_ids: list[int] = field(default_factory=list)
    logprobs: bytearray = field(default_factory=bytearray)
    """A packed row per output token, if they were asked for."""
    prompt_logprobs: bytes = b""
    """A packed row per prompt token from the second on, likewise; they come with the first output token."""
    sources: PromptSources | None = None
    ending: Ending | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_tokens: int = 0
    """Output tokens whose text is known."""
    error: ApiError | None = None
    num_resubmissions: int = 0
    traceparent: str = ""
    """The trace that its engine is to go on; empty = none."""

    # The tokenizer's side of the present text stream.
    num_sent: int = 0
    opened: bool = False
    finish_sent: bool = False
    num_chars: int = 0
    """Characters of text received; after a new stream they are skipped once."""
    skip_chars: int = 0

    _pieces: list[str] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    # -- the engine's side ------------------------------------------------------------------------

    def take_tokens(self, delta: RequestDelta) -> None:
        """Repeated indices are ignored. Raises OutOfStep for a gap."""
        known = len(self.output_ids)
        if delta.first_index > known:
            raise OutOfStep(f"token {delta.first_index} came, {known} is next")
        num_repeated = known - delta.first_index
        self.output_ids.extend(delta.token_ids[num_repeated:])
        if self.work.sampling.logprobs is not None:
            self.logprobs += delta.logprobs[num_repeated * row_nbytes(self.work.sampling.logprobs) :]
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        if self.sources is None:
            self.sources = delta.sources
        self.ending = delta.ending

    @property
    def num_text_tokens(self) -> int:
        """Output tokens that make text: a stop token that ended the request makes none."""
        ending = self.ending
        if (
            ending is None
            or ending.reason is not FinishReason.STOP
            or self.work.text.include_stop_in_text
            or not self.output_ids
            or self.output_ids[-1] != ending.stop_token_id
        ):
            return len(self.output_ids)
        return len(self.output_ids) - 1

    # -- the tokenizer's side ---------------------------------------------------------------------

    def reopen_text(self) -> None:
        """The text stream is a new one: it needs every token again, and repeats the text we have."""
        self.opened = self.finish_sent = False
        self.num_sent = 0
        self.skip_chars = self.num_chars

    def take_text(self, delta: TextDelta) -> None:
        text = delta.text
        if self.skip_chars:
            skipped = min(self.skip_chars, len(text))
            self.skip_chars -= skipped
            text = text[skipped:]
        self.num_chars += len(text)
        self.num_tokens = max(self.num_tokens, delta.num_tokens)
        self._pieces.append(text)
        if delta.finished:
            self._finish(delta)
        self._news.set()

    def _finish(self, delta: TextDelta) -> None:
        if delta.matched_stop is not None:
            self.num_tokens = delta.num_tokens
            self.finish_reason, self.stop_reason = "stop", delta.matched_stop
            return
        assert self.ending is not None
        self.num_tokens = len(self.output_ids)
        self.finish_reason = self.ending.reason.value
        stop = self.ending.stop_token_id
        if stop is not None and (self.work.sampling.ignore_eos or stop not in self.work.eos_token_ids):
            self.stop_reason = stop

    # -- the client's side ------------------------------------------------------------------------

    def fail(self, error: ApiError) -> None:
        if not self.done:
            self.error = error
            self._news.set()

    async def begun(self) -> None:
        """Waits for the first news and leaves it there. Raises the ApiError that came instead."""
        await self._news.wait()
        if self.error is not None:
            raise self.error

    async def next_update(self) -> Update:
        """Waits for news. Raises the ApiError that ended the sequence."""
        await self._news.wait()
        self._news.clear()
        if self.error is not None:
            raise self.error
        text = "".join(self._pieces)
        self._pieces.clear()
        return Update(text, self.num_tokens, self.finish_reason, self.stop_reason)
