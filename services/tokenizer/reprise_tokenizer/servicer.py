"""gRPC in: `reprise.v1.TokenizerService`. Decode, call, encode."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from reprise.v1 import tokenizer_service_pb2 as pb
from reprise.v1.tokenizer_service_pb2_grpc import TokenizerServiceServicer
from reprise_core.errors import InvalidInput
from reprise_tokenizer.metrics import TokenizerMetrics
from reprise_tokenizer.model_files import ModelFiles
from reprise_tokenizer.text_decoder import DecoderFactory
from reprise_tokenizer.text_streams import Opening, Piece, TextStreams
from reprise_tokenizer.tokenizing import Conversation, Tokenizing
from reprise_tokenizer.work_pool import WorkPool
from reprise_wire.hash_profiles import HashRequest, hashes_to_proto, lora_from_proto, profile_from_proto

SERVICE_NAME = "reprise.v1.TokenizerService"
_TOKENS_PER_TURN = 2048
"""Tokens decoded before other streams and calls get their turn on the event loop."""


class TokenizerRpc(TokenizerServiceServicer):
    def __init__(
        self,
        files: ModelFiles,
        tokenizing: Tokenizing,
        pool: WorkPool,
        metrics: TokenizerMetrics,
        *,
        model_name: str,
        max_stream_requests: int,
    ) -> None:
        self._files = files
        self._tokenizing = tokenizing
        self._pool = pool
        self._metrics = metrics
        self._model_name = model_name
        self._max_stream_requests = max_stream_requests
        self._factory = DecoderFactory(files.tokenizer, files.decoder, files.special_ids)

    async def GetInfo(
        self, request: pb.TokenizerServiceGetInfoRequest, context: Any
    ) -> pb.TokenizerServiceGetInfoResponse:
        return pb.TokenizerServiceGetInfoResponse(
            model_name=self._model_name,
            vocab_size=self._files.tokenizer.get_vocab_size(with_added_tokens=True),
            has_chat_template=self._files.chat_template is not None,
            eos_token_ids=self._files.eos_token_ids,
            bos_token_id=self._files.bos_token_id,
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        prompt = _prompt_from_proto(request)
        hashing = self._hashing_from_proto(request.hash) if request.HasField("hash") else None
        token_ids, hashes = await self._pool.run(
            "tokenize",
            lambda: self._tokenizing.tokenize(
                prompt, add_special_tokens=request.add_special_tokens, hashing=hashing
            ),
        )
        return pb.TokenizeResponse(token_ids=token_ids, hashes=map(hashes_to_proto, hashes))

    async def HashTokens(self, request: pb.HashTokensRequest, context: Any) -> pb.HashTokensResponse:
        hashing = self._hashing_from_proto(request.hash)
        hashes = await self._pool.run("hash", lambda: self._tokenizing.hash(request.token_ids, hashing))
        return pb.HashTokensResponse(hashes=map(hashes_to_proto, hashes))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        text = await self._pool.run(
            "detokenize",
            lambda: self._tokenizing.detokenize(
                request.token_ids, skip_special_tokens=request.skip_special_tokens
            ),
        )
        return pb.DetokenizeResponse(text=text)

    async def GetTokenBytes(self, request: pb.GetTokenBytesRequest, context: Any) -> pb.GetTokenBytesResponse:
        token_bytes = self._factory.token_bytes
        tokens = await self._pool.run("token_bytes", lambda: [*map(token_bytes, request.token_ids)])
        return pb.GetTokenBytesResponse(tokens=tokens)

    async def DetokenizeStream(
        self, request_iterator: AsyncIterator[pb.DetokenizeStreamRequest], context: Any
    ) -> AsyncIterator[pb.DetokenizeStreamResponse]:
        # The caller learns at once that the stream is open.
        await context.send_initial_metadata(())
        streams = TextStreams(self._factory, max_requests=self._max_stream_requests, metrics=self._metrics)
        self._metrics.streams.inc()
        try:
            async for message in request_iterator:
                yield pb.DetokenizeStreamResponse(deltas=await self._decode(streams, message))
        finally:
            streams.close()
            self._metrics.streams.dec()

    async def _decode(self, streams: TextStreams, message: pb.DetokenizeStreamRequest) -> list[pb.TextDelta]:
        deltas: list[pb.TextDelta] = []
        num_tokens = 0
        for update in message.updates:
            opening = _opening_from_proto(update.open) if update.HasField("open") else None
            piece = streams.update(update.request_id, opening, update.token_ids, finish=update.finish)
            if piece is not None:
                deltas.append(_piece_to_proto(update.request_id, piece))
            num_tokens += len(update.token_ids)
            if num_tokens >= _TOKENS_PER_TURN:
                self._metrics.stream_tokens.inc(num_tokens)
                num_tokens = 0
                await asyncio.sleep(0)
        self._metrics.stream_tokens.inc(num_tokens)
        return deltas

    def _hashing_from_proto(self, message: pb.HashRequest) -> HashRequest:
        return HashRequest(
            profiles=tuple(profile_from_proto(profile) for profile in message.profiles),
            cache_salt=message.cache_salt or None,
            lora=lora_from_proto(message.lora) if message.HasField("lora") else None,
        )


def _prompt_from_proto(request: pb.TokenizeRequest) -> str | Conversation:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "chat":
        return Conversation(
            messages_json=request.chat.messages_json,
            tools_json=request.chat.tools_json,
            template_kwargs_json=request.chat.template_kwargs_json,
            chat_template=request.chat.chat_template,
            add_generation_prompt=request.chat.add_generation_prompt,
            continue_final_message=request.chat.continue_final_message,
        )
    raise InvalidInput("prompt", "is missing; text or chat is needed")


def _opening_from_proto(message: pb.DetokenizeOpen) -> Opening:
    return Opening(
        stop=tuple(message.stop),
        include_stop=message.include_stop_in_text,
        skip_special_tokens=message.skip_special_tokens,
        prompt_tail_ids=tuple(message.prompt_tail_ids),
        min_tokens=message.min_tokens,
    )


def _piece_to_proto(request_id: str, piece: Piece) -> pb.TextDelta:
    return pb.TextDelta(
        request_id=request_id,
        text=piece.text,
        num_tokens=piece.num_tokens,
        matched_stop=piece.matched_stop,
        finished=piece.finished,
    )
