"""The one detokenizing stream to the tokenizer, shared by all sequences.

What is sent is read from the sequences when the stream has room, so tokens that pile up behind a slow
tokenizer are merged and nothing is queued. After a loss every sequence is opened again with all its
output tokens; the text that it gives again is skipped.
"""

import asyncio
import time
from collections.abc import Callable

from reprise_core.errors import ErrorKind, RepriseError
from reprise_gateway.errors import ApiError
from reprise_gateway.metrics import GatewayMetrics
from reprise_gateway.ports import TextStream, TextStreamApi
from reprise_gateway.sequence import Sequence
from reprise_runtime.logs import get_logger
from reprise_wire.clients.tokenizer import DetokenizeUpdate
from reprise_wire.error_codec import PeerError


class TextLink:
    """`on_stop` is told of a sequence that a stop string ended, `on_state` of a problem, or of its end."""

    def __init__(
        self,
        api: TextStreamApi,
        *,
        metrics: GatewayMetrics,
        on_stop: Callable[[Sequence], None],
        on_state: Callable[[str | None], None],
        wait_s: float,
        retry_interval_s: float,
        connect_timeout_s: float,
    ) -> None:
        self._api = api
        self._metrics = metrics
        self._on_stop = on_stop
        self._on_state = on_state
        self._wait_s = wait_s
        self._retry_interval_s = retry_interval_s
        self._connect_timeout_s = connect_timeout_s
        self._log = get_logger()
        self._sequences: dict[str, Sequence] = {}
        self._dirty: dict[str, Sequence] = {}
        self._closing: list[str] = []
        self._wake = asyncio.Event()
        self._away_since_s: float | None = time.monotonic()
        self.connected = False

    def push(self, sequence: Sequence) -> None:
        """The sequence has new tokens, or has ended."""
        self._sequences[sequence.request_id] = sequence
        self._dirty[sequence.request_id] = sequence
        self._wake.set()

    def drop(self, sequence: Sequence) -> None:
        """Nobody wants its text any more."""
        known = self._sequences.pop(sequence.request_id, None)
        self._dirty.pop(sequence.request_id, None)
        if known is not None and sequence.opened and not sequence.finish_sent and self.connected:
            self._closing.append(sequence.request_id)
            self._wake.set()

    async def run(self) -> None:
        while True:
            try:
                stream = await self._api.text_stream(timeout_s=self._connect_timeout_s)
            except PeerError as error:
                self._on_state(str(error))
                self._fail_overdue(error)
                await asyncio.sleep(self._retry_interval_s)
                continue
            try:
                await self._exchange(stream)
            except PeerError as error:
                self._log.warning("tokenizer stream broke", error=str(error))
                self._on_state(str(error))
            finally:
                stream.cancel()
                self.connected = False
            self._metrics.stream_breaks.labels("tokenizer").inc()
            self._away_since_s = time.monotonic()
            await asyncio.sleep(self._retry_interval_s)

    async def _exchange(self, stream: TextStream) -> None:
        self._away_since_s = None
        self.connected = True
        self._closing.clear()
        for sequence in self._sequences.values():
            sequence.reopen_text()
            if sequence.output_ids or sequence.ending is not None:
                self._dirty[sequence.request_id] = sequence
        self._wake.set()
        self._on_state(None)
        writer = asyncio.ensure_future(self._write(stream))
        reader = asyncio.ensure_future(self._read(stream))
        try:
            await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            writer.cancel()
            reader.cancel()
            ended = await asyncio.gather(writer, reader, return_exceptions=True)
        for outcome in ended:
            if isinstance(outcome, Exception):
                raise outcome

    async def _write(self, stream: TextStream) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            updates = [DetokenizeUpdate(request_id, (), finish=True) for request_id in self._closing]
            self._closing.clear()
            updates += [_next_update(sequence) for sequence in self._dirty.values()]
            self._dirty.clear()
            if updates:
                await stream.write(updates)

    async def _read(self, stream: TextStream) -> None:
        while (deltas := await stream.read()) is not None:
            for delta in deltas:
                sequence = self._sequences.get(delta.request_id)
                if sequence is None:
                    continue
                if delta.finished:
                    del self._sequences[delta.request_id]
                    self._dirty.pop(delta.request_id, None)
                sequence.take_text(delta)
                if delta.matched_stop is not None:
                    self._on_stop(sequence)
        raise PeerError(ErrorKind.UNAVAILABLE, "the tokenizer ended the stream")

    def _fail_overdue(self, error: RepriseError) -> None:
        """Sequences that wait for text do so for `wait_s` after the loss, and then fail."""
        if self._away_since_s is None or time.monotonic() - self._away_since_s < self._wait_s:
            return
        for sequence in list(self._sequences.values()):
            del self._sequences[sequence.request_id]
            message = f"the tokenizer was away for {self._wait_s:g} s: {error}"
            sequence.fail(ApiError(503, message, retry_after_s=1.0))
            self._on_stop(sequence)
        self._dirty.clear()


def _next_update(sequence: Sequence) -> DetokenizeUpdate:
    """What the tokenizer does not have yet; from then on it has it."""
    end = sequence.num_text_tokens
    finish = sequence.ending is not None
    update = DetokenizeUpdate(
        sequence.request_id,
        sequence.output_ids[sequence.num_sent : end],
        open=None if sequence.opened else sequence.work.text,
        finish=finish,
    )
    sequence.opened, sequence.num_sent, sequence.finish_sent = True, end, finish
    return update
