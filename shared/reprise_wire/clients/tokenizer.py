"""The way to the tokenizer service: tokens, block hashes, text.

Every failure is a `PeerError`: UNAVAILABLE means that the service is away, INVALID that the input
was refused, in the service's own words.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from reprise.v1 import tokenizer_service_pb2 as pb
from reprise.v1.tokenizer_service_pb2_grpc import TokenizerServiceStub
from reprise_core.errors import ErrorKind
from reprise_wire.clients.engine import broken_write
from reprise_wire.error_codec import PeerError, from_rpc_error
from reprise_wire.hash_profiles import (
    HashRequest,
    ProfileHashes,
    hashes_from_proto,
    lora_to_proto,
    profile_to_proto,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    model_name: str
    vocab_size: int
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to be rendered by the model's template; JSON texts are in OpenAI's shape."""

    messages_json: str
    tools_json: str = ""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str = ""
    template_kwargs_json: str = ""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    token_ids: list[int]
    hashes: tuple[ProfileHashes, ...]


@dataclass(frozen=True, slots=True)
class DetokenizeOpen:
    """How the text of one request is to be made."""

    stop: tuple[str, ...] = ()
    include_stop_in_text: bool = False
    skip_special_tokens: bool = True
    prompt_tail_ids: tuple[int, ...] = ()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DetokenizeUpdate:
    """More output tokens of one request; `open` on its first update of a stream."""

    request_id: str
    token_ids: Sequence[int]
    open: DetokenizeOpen | None = None
    finish: bool = False


@dataclass(frozen=True, slots=True)
class TextDelta:
    """`num_tokens` output tokens are decoded; with `matched_stop` it is the one that completed it."""

    request_id: str
    text: str
    num_tokens: int
    matched_stop: str | None
    finished: bool


class TokenizerClient:
    """`channel` is the caller's, who also closes it."""

    def __init__(
        self, channel: grpc.aio.Channel, *, timeout_s: float = 30.0, peer: str = "tokenizer"
    ) -> None:
        self._stub = TokenizerServiceStub(channel)  # type: ignore[no-untyped-call]
        self._timeout_s = timeout_s
        self._peer = peer

    async def info(self, *, timeout_s: float = 2.0) -> TokenizerInfo:
        request = pb.TokenizerServiceGetInfoRequest()
        message: pb.TokenizerServiceGetInfoResponse = await self._call(
            self._stub.GetInfo(request, timeout=timeout_s)
        )
        return TokenizerInfo(
            model_name=message.model_name,
            vocab_size=message.vocab_size,
            has_chat_template=message.has_chat_template,
            eos_token_ids=tuple(message.eos_token_ids),
            bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        )

    async def tokenize_text(
        self, text: str, *, add_special_tokens: bool = True, hashing: HashRequest | None = None
    ) -> TokenizedPrompt:
        return await self._tokenize(
            pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens, hash=_hash_to_proto(hashing))
        )

    async def tokenize_chat(
        self, chat: ChatPrompt, *, add_special_tokens: bool = False, hashing: HashRequest | None = None
    ) -> TokenizedPrompt:
        message = pb.Chat(
            messages_json=chat.messages_json,
            tools_json=chat.tools_json,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            chat_template=chat.chat_template,
            template_kwargs_json=chat.template_kwargs_json,
        )
        return await self._tokenize(
            pb.TokenizeRequest(
                chat=message, add_special_tokens=add_special_tokens, hash=_hash_to_proto(hashing)
            )
        )

    async def hash_tokens(self, token_ids: Sequence[int], hashing: HashRequest) -> tuple[ProfileHashes, ...]:
        request = pb.HashTokensRequest(token_ids=token_ids, hash=_hash_to_proto(hashing))
        response: pb.HashTokensResponse = await self._call(
            self._stub.HashTokens(request, timeout=self._timeout_s)
        )
        return hashes_from_proto(response.hashes)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        response: pb.DetokenizeResponse = await self._call(
            self._stub.Detokenize(request, timeout=self._timeout_s)
        )
        return response.text

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """What each token by itself adds to a text; empty for an id outside the vocabulary."""
        request = pb.GetTokenBytesRequest(token_ids=token_ids)
        response: pb.GetTokenBytesResponse = await self._call(
            self._stub.GetTokenBytes(request, timeout=self._timeout_s)
        )
        return list(response.tokens)

    async def text_stream(self, *, timeout_s: float) -> "TextStreamCall":
        """Opens the stream; returns once the service has taken it."""
        call = TextStreamCall(self._stub.DetokenizeStream(), self._peer)
        try:
            await call.open(timeout_s)
        except BaseException:
            call.cancel()
            raise
        return call

    async def _tokenize(self, request: pb.TokenizeRequest) -> TokenizedPrompt:
        response: pb.TokenizeResponse = await self._call(
            self._stub.Tokenize(request, timeout=self._timeout_s)
        )
        return TokenizedPrompt(list(response.token_ids), hashes_from_proto(response.hashes))

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._peer) from error


class TextStreamCall:
    """One detokenizing stream: many requests, one message per step in each direction."""

    def __init__(self, call: Any, peer: str) -> None:
        self._call = call
        self._peer = peer

    async def open(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._call.wait_for_connection()
        except TimeoutError:
            raise PeerError(ErrorKind.UNAVAILABLE, f"{self._peer}: no answer in {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._peer) from error

    async def write(self, updates: Iterable[DetokenizeUpdate]) -> None:
        message = pb.DetokenizeStreamRequest(updates=[_update_to_proto(update) for update in updates])
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise broken_write(error, self._peer) from error

    async def read(self) -> list[TextDelta] | None:
        """The next message's deltas; None when the service ended the stream."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._peer) from error
        if message is grpc.aio.EOF:
            return None
        return [_text_from_proto(delta) for delta in message.deltas]

    def cancel(self) -> None:
        self._call.cancel()


def _hash_to_proto(hashing: HashRequest | None) -> pb.HashRequest | None:
    if hashing is None or not hashing.profiles:
        return None
    return pb.HashRequest(
        profiles=[profile_to_proto(profile) for profile in hashing.profiles],
        cache_salt=hashing.cache_salt or "",
        lora=lora_to_proto(hashing.lora) if hashing.lora is not None else None,
    )


def _update_to_proto(update: DetokenizeUpdate) -> pb.DetokenizeUpdate:
    return pb.DetokenizeUpdate(
        request_id=update.request_id,
        open=_open_to_proto(update.open) if update.open is not None else None,
        token_ids=update.token_ids,
        finish=update.finish,
    )


def _open_to_proto(opening: DetokenizeOpen) -> pb.DetokenizeOpen:
    return pb.DetokenizeOpen(
        stop=opening.stop,
        include_stop_in_text=opening.include_stop_in_text,
        skip_special_tokens=opening.skip_special_tokens,
        prompt_tail_ids=opening.prompt_tail_ids,
        min_tokens=opening.min_tokens,
    )


def _text_from_proto(message: pb.TextDelta) -> TextDelta:
    return TextDelta(
        request_id=message.request_id,
        text=message.text,
        num_tokens=message.num_tokens,
        matched_stop=message.matched_stop if message.HasField("matched_stop") else None,
        finished=message.finished,
    )
