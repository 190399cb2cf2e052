"""Every recorded hash line, through every encoder that is here."""

from pathlib import Path

import pytest

from reprise_cli.conformance_hashes import check_hash_row
from reprise_cli.conformance_runner import read_rows
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.native_encoding import Encoding, available_encodings

VECTORS = Path(__file__).parent / "vectors" / "hashes.jsonl.gz"


@pytest.mark.parametrize("encoding", available_encodings(HashAlgorithm.SHA256))
def test_every_recorded_line(encoding: Encoding) -> None:
    rows = list(read_rows(VECTORS))
    failures = [
        f"{row['id']}: {outcome.difference}"
        for row in rows
        if (outcome := check_hash_row(row, encoding=encoding)).difference is not None
    ]
    assert not failures, "\n".join(failures[:3])
    assert len(rows) == 906
