"""Log-probabilities of tokens, packed in rows of a fixed size.

A row is one position: the log-probability and the rank of the token that stands there, then the ids
and the log-probabilities of the `num_top` most probable tokens, the best first. Little-endian:
float32, uint32, num_top x uint32, num_top x float32. Rows of one request are put together and cut as
bytes, so nobody between the worker and the answer reads them.

Values are the log-softmax, in float32, of the model's raw logits: before temperature, cuts and bans.
Source: vLLM's default `logprobs_mode`, `raw_logprobs`.
"""

import struct
from dataclasses import dataclass

MAX_LOGPROBS = 20
"""Most probable tokens beside each token, at most. Source: vLLM's default `max_logprobs`."""
MAX_PROMPT_LOGPROB_BYTES = 16 * 1024 * 1024
"""Rows of one prompt travel in one message; this is far below what a message may have."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One row. `rank` counts from 1: the tokens that are more probable, and one."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


def row_nbytes(num_top: int) -> int:
    return 8 + 8 * num_top


def unpack_rows(rows: bytes | bytearray | memoryview, num_top: int) -> list[TokenLogprobs]:
    """Raises ValueError when `rows` are no whole rows."""
    if len(rows) % row_nbytes(num_top):
        raise ValueError(f"{len(rows)} bytes are no rows of {row_nbytes(num_top)} bytes")
    layout = struct.Struct(f"<fI{num_top}I{num_top}f")
    end_of_ids = 2 + num_top
    return [
        TokenLogprobs(row[0], row[1], row[2:end_of_ids], row[end_of_ids:]) for row in layout.iter_unpack(rows)
    ]
