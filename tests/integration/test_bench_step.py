"""`reprise bench step` measures what it says: real processes, few steps."""

from reprise_cli.bench.step import Load, Recorder, step_rows
from reprise_scheduler.probe import Mark


def test_every_load_has_its_rows_and_peers() -> None:
    loads = (Load(2), Load(2, waiting=3), Load(2, gateways=2))
    rows = {row.case: row for row in step_rows(loads=loads, steps=30)}
    for name in ("2 running", "2 running, 3 waiting", "2 running, 2 gateways"):
        assert 0 < rows[f"{name} p50"].value <= rows[f"{name} p99"].value
        assert 0 < rows[f"{name} to gRPC p50"].value <= rows[f"{name} to gRPC p99"].value
        shares = [rows[f"{name} share {part}"].value for part in ("decode", "apply", "plan", "encode + send")]
        assert all(share > 0 for share in shares)
    assert rows["2 running p50"].peer == ""
    assert rows["2 running, 3 waiting p50"].peer_value == rows["2 running p50"].value


def test_tokens_that_wait_for_a_message_being_sent_count_until_a_later_one() -> None:
    recorder = Recorder()
    for _ in range(3):
        recorder.mark(Mark.RECEIVED)
        recorder.mark(Mark.DELIVERED)
    recorder.mark(Mark.HANDED_OVER)
    recorder.mark(Mark.RECEIVED)
    spans_ms = recorder.spans_ms(Mark.RECEIVED, Mark.HANDED_OVER)
    assert len(spans_ms) == 3
    assert spans_ms[0] > spans_ms[1] > spans_ms[2] > 0
