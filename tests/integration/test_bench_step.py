"""`reprise bench step` measures what it says: real processes, few steps."""

from reprise_cli.bench.step import Load, step_rows


def test_every_load_has_its_rows_and_peers() -> None:
    rows = {row.case: row for row in step_rows(loads=(Load(2), Load(2, waiting=3)), steps=30)}
    for name in ("2 running", "2 running, 3 waiting"):
        assert 0 < rows[f"{name} p50"].value <= rows[f"{name} p99"].value
        shares = [rows[f"{name} share {part}"].value for part in ("decode", "apply", "plan", "encode + send")]
        assert all(share > 0 for share in shares)
    assert rows["2 running p50"].peer == ""
    assert rows["2 running, 3 waiting p50"].peer_value == rows["2 running p50"].value
