"""Rows of log-probabilities as an engine without a model makes them."""

import struct

from reprise_core.logprobs import TokenLogprobs


def pack_row(row: TokenLogprobs) -> bytes:
    num_top = len(row.top_ids)
    return struct.pack(f"<fI{num_top}I{num_top}f", row.logprob, row.rank, *row.top_ids, *row.top_logprobs)
