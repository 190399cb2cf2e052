"""The text state of the requests of one detokenizing stream."""

from collections.abc import Iterable
from dataclasses import dataclass

from reprise_core.errors import Exhausted
from reprise_tokenizer.metrics import TokenizerMetrics
from reprise_tokenizer.stop_strings import StopFinder, StopMatch
from reprise_tokenizer.text_decoder import DecoderFactory, TextDecoder


@dataclass(frozen=True, slots=True)
class Opening:
    """How the text of one request is to be made."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    prompt_tail_ids: tuple[int, ...] = ()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is safe to show. With `matched_stop`, `num_tokens` is the token that completed it."""

    text: str
    num_tokens: int
    matched_stop: str | None = None
    finished: bool = False


class RequestText:
    """Text of one request. Tokens are taken one by one, so how they were batched changes nothing."""

    __slots__ = ("_decoder", "_min_tokens", "_num_tokens", "_stops")

    def __init__(self, decoder: TextDecoder, opening: Opening) -> None:
        self._decoder = decoder
        self._stops = StopFinder(opening.stop, include=opening.include_stop)
        self._min_tokens = opening.min_tokens
        self._num_tokens = 0

    def feed(self, token_ids: Iterable[int], *, finish: bool) -> Piece:
        pieces: list[str] = []
        for token_id in token_ids:
            self._num_tokens += 1
            match = self._add(self._decoder.feed(token_id), pieces)
            if match is not None:
                return match
        if finish:
            match = self._add(self._decoder.flush(), pieces)
            if match is not None:
                return match
            pieces.append(self._stops.flush())
        return Piece("".join(pieces), self._num_tokens, finished=finish)

    def _add(self, text: str, pieces: list[str]) -> Piece | None:
        """Appends what can be given out; a match ends the request."""
        found = self._stops.feed(text, searching=self._num_tokens > self._min_tokens)
        if isinstance(found, StopMatch):
            pieces.append(found.text)
            return Piece("".join(pieces), self._num_tokens, matched_stop=found.stop, finished=True)
        pieces.append(found)
        return None


class TextStreams:
    """The requests of one stream; dropped with it. Bounded: one request too many ends the stream."""

    def __init__(self, factory: DecoderFactory, *, max_requests: int, metrics: TokenizerMetrics) -> None:
        self._factory = factory
        self._max_requests = max_requests
        self._metrics = metrics
        self._requests: dict[str, RequestText] = {}

    def update(
        self, request_id: str, opening: Opening | None, token_ids: Iterable[int], *, finish: bool
    ) -> Piece | None:
        """None for a request that is not open here: its tokens came after its end."""
        if opening is not None:
            self._open(request_id, opening)
        request = self._requests.get(request_id)
        if request is None:
            self._metrics.late_updates.inc()
            return None
        piece = request.feed(token_ids, finish=finish)
        if piece.matched_stop is not None:
            self._metrics.stop_matches.inc()
        if piece.finished:
            self._forget(request_id)
        return piece

    def close(self) -> None:
        self._metrics.stream_requests.dec(len(self._requests))
        self._requests.clear()

    def _open(self, request_id: str, opening: Opening) -> None:
        """Opening a known request again begins it anew."""
        if request_id in self._requests:
            self._forget(request_id)
        if len(self._requests) >= self._max_requests:
            self._metrics.refused_streams.inc()
            raise Exhausted(f"more than {self._max_requests} requests on one detokenizing stream")
        decoder = self._factory.make(
            skip_special_tokens=opening.skip_special_tokens, prompt_tail_ids=opening.prompt_tail_ids
        )
        self._requests[request_id] = RequestText(decoder, opening)
        self._metrics.stream_requests.inc()

    def _forget(self, request_id: str) -> None:
        del self._requests[request_id]
        self._metrics.stream_requests.dec()
