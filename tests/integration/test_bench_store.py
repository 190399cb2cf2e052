"""`reprise bench store` on small shapes: what it measures, and against what."""

from reprise_cli.bench.store import KIB, store_rows


def test_every_case_has_a_rate_and_its_peer() -> None:
    rows = {row.case: row for row in store_rows(sizes=(64 * KIB,), batches=(1, 3), repeats=1)}
    for shape in ("64 KiB x1", "64 KiB x3"):
        peers = {
            f"load redis {shape}": "redis-py pipelined GET",
            f"save redis {shape}": "redis-py pipelined SET",
            f"load host {shape}": "load redis",
            f"limit host {shape}": "load redis",
            f"save host {shape}": "save redis",
            f"memcpy {shape}": "",
        }
        for case, peer in peers.items():
            row = rows[case]
            assert (row.unit, row.peer) == ("MB/s", peer)
            assert row.value > 0
            assert (row.ratio is not None) == bool(peer)
        assert rows[f"load host {shape}"].peer_value == rows[f"load redis {shape}"].value
    assert 0 < rows["lookup 1024 p50"].value <= rows["lookup 1024 p99"].value
    assert len(rows) == 14
