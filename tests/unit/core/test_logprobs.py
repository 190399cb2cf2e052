"""Packed rows of log-probabilities: what is packed is read, and cutting bytes cuts rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise_core.logprobs import TokenLogprobs, row_nbytes, unpack_rows
from support.logprob_rows import pack_row

VALUE = st.floats(max_value=0, width=32, allow_nan=False)
ID = st.integers(0, 2**32 - 1)


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, list[TokenLogprobs]]:
    num_top = draw(st.integers(0, 20))
    ids, values = (st.lists(kind, min_size=num_top, max_size=num_top).map(tuple) for kind in (ID, VALUE))
    return num_top, draw(st.lists(st.builds(TokenLogprobs, VALUE, ID, ids, values), max_size=5))


@given(rows(), st.integers(0, 5))
def test_what_is_packed_is_read_also_from_a_row_on(made: tuple[int, list[TokenLogprobs]], first: int) -> None:
    num_top, expected = made
    packed = b"".join(map(pack_row, expected))
    assert len(packed) == len(expected) * row_nbytes(num_top)
    assert unpack_rows(packed, num_top) == expected
    assert unpack_rows(packed[first * row_nbytes(num_top) :], num_top) == expected[first:]


def test_the_bytes_are_fixed() -> None:
    row = TokenLogprobs(-0.5, 3, (1, 258), (-0.25, float("-inf")))
    assert pack_row(row).hex() == "000000bf03000000" + "0100000002010000" + "000080be000080ff"


def test_a_part_of_a_row_is_no_row() -> None:
    with pytest.raises(ValueError, match="17 bytes are no rows of 16 bytes"):
        unpack_rows(bytes(17), 1)
