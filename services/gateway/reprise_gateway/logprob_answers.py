"""Log-probabilities in the shapes of the reference's OpenAI routes, members in its order."""

import asyncio
import codecs
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from reprise_core.logprobs import TokenLogprobs, row_nbytes, unpack_rows
from reprise_gateway.completions import Run
from reprise_gateway.errors import ApiError
from reprise_gateway.token_texts import TokenTexts

Json = dict[str, Any]
Position = tuple[int, TokenLogprobs | None]
"""A token and what is known of it; nothing is known of a prompt's first."""
T = TypeVar("T")
_LOWEST = -9999.0
"""For what JSON has no number for: a token that cannot come has minus infinity."""
_AT_ONCE = 512
"""Positions shaped on the event loop; more are shaped on a thread."""


class ChoiceLogprobs:
    """Of one answer: its output piece by piece, its prompt as a whole. Raises ApiError."""

    def __init__(self, run: Run, i: int, texts: TokenTexts) -> None:
        self._asked = run.call.logprobs
        self._sequence = run.sequences[i]
        # The prompt is measured once for its n answers.
        self._measured = run.sequences[i - i % run.call.n]
        self._texts = texts
        self._shape = self._chat_shape if run.call.chat else self._completion_shape
        self._num_shown = 0
        self._begun = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._text_offset = 0

    async def up_to(self, num_tokens: int) -> Json | None:
        """Of the output tokens after those of the last call; None when there are none, or nobody asked."""
        num_top = self._asked.output
        if num_top is None:
            return None
        positions: list[Position] = []
        if self._asked.echoes and not self._begun:
            positions += await self._prompt_positions(num_top)
        self._begun = True
        size = row_nbytes(num_top)
        first, self._num_shown = self._num_shown, num_tokens
        token_ids = self._sequence.output_ids[first:num_tokens]
        positions += _joined(token_ids, self._sequence.logprobs[first * size : num_tokens * size], num_top)
        await self._know(positions)
        return await _aside(lambda: self._shape(positions), len(positions)) if positions else None

    async def of_prompt(self) -> list[Json | None] | None:
        """Per prompt token a map from ids; None when nobody asked."""
        if self._asked.prompt is None:
            return None
        positions = await self._prompt_positions(self._asked.prompt)
        await self._know(positions)
        return await _aside(lambda: [self._by_id(*position) for position in positions], len(positions))

    async def _prompt_positions(self, num_top: int) -> list[Position]:
        """With at most `num_top` tokens each; more may have been measured."""
        token_ids = self._measured.work.prompt_ids
        measured = self._asked.measured_prompt
        assert measured is not None
        rows = self._measured.prompt_logprobs

        def cut() -> list[Position]:
            whole = _joined(token_ids[1:], rows, measured)
            return [(token_ids[0], None), *((token_id, _cut(row, num_top)) for token_id, row in whole)]

        return await _aside(cut, len(token_ids))

    async def _know(self, positions: list[Position]) -> None:
        ids = {token_id for token_id, _ in positions}
        ids.update(top_id for _, row in positions if row is not None for top_id in row.top_ids)
        await self._texts.know(ids)

    # -- shapes -------------------------------------------------------------------------------------

    def _completion_shape(self, positions: Sequence[Position]) -> Json:
        offsets = []
        for token_id, _ in positions:
            offsets.append(self._text_offset)
            self._text_offset += len(self._utf8.decode(self._texts.bytes_of(token_id)))
        return {
            "text_offset": offsets,
            "token_logprobs": [None if row is None else _number(row.logprob) for _, row in positions],
            "tokens": [self._text(token_id) for token_id, _ in positions],
            "top_logprobs": [self._by_text(*position) for position in positions],
        }

    def _by_text(self, token_id: int, row: TokenLogprobs | None) -> Json | None:
        """The token first. Of tokens with the same text the more probable one stays, and the token itself."""
        if row is None:
            return None
        found: Json = {self._text(token_id): _number(row.logprob)}
        for top_id, value in zip(row.top_ids, row.top_logprobs, strict=True):
            found.setdefault(self._text(top_id), _number(value))
        return found

    def _chat_shape(self, positions: Sequence[Position]) -> Json:
        content = []
        for token_id, row in positions:
            assert row is not None
            tops = zip(row.top_ids, row.top_logprobs, strict=True)
            entry = self._entry(token_id, row.logprob)
            content.append({**entry, "top_logprobs": [self._entry(*top) for top in tops]})
        return {"content": content}

    def _entry(self, token_id: int, value: float) -> Json:
        return {
            "token": self._text(token_id),
            "logprob": _number(value),
            "bytes": list(self._texts.bytes_of(token_id)),
        }

    def _by_id(self, token_id: int, row: TokenLogprobs | None) -> Json | None:
        """The token first, then the most probable ones."""
        if row is None:
            return None
        found = {token_id: (row.logprob, row.rank)}
        for rank, (top_id, value) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True), start=1):
            found.setdefault(top_id, (value, rank))
        return {
            str(one): {
                "logprob": _number(value),
                "rank": rank,
                "decoded_token": self._texts.text_of(one),
            }
            for one, (value, rank) in found.items()
        }

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._asked.ids_for_texts else self._texts.text_of(token_id)


async def _aside(work: Callable[[], T], num_positions: int) -> T:
    return work() if num_positions <= _AT_ONCE else await asyncio.to_thread(work)


def _joined(token_ids: Sequence[int], rows: bytes | bytearray, num_top: int) -> list[Position]:
    if len(rows) != len(token_ids) * row_nbytes(num_top):
        raise ApiError(
            502, f"the engine gave {len(rows)} bytes of log-probabilities for {len(token_ids)} tokens"
        )
    return list(zip(token_ids, unpack_rows(rows, num_top), strict=True))


def _cut(row: TokenLogprobs | None, num_top: int) -> TokenLogprobs | None:
    assert row is not None
    return TokenLogprobs(row.logprob, row.rank, row.top_ids[:num_top], row.top_logprobs[:num_top])


def _number(value: float) -> float:
    return max(value, _LOWEST)
