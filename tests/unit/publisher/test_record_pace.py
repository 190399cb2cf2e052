"""When to record."""

import pytest

from reprise_publisher.record_pace import LATE_S, LATE_SHARE, QUIET_S, SHARE, RecordPace


def test_the_first_batch_is_recorded_at_once() -> None:
    pace = RecordPace()
    pace.batches_came(now_s=100.0)
    assert pace.wait_s(now_s=100.0) == 0


@pytest.mark.parametrize(("lag_s", "share"), [(0.0, SHARE), (LATE_S + 0.01, LATE_SHARE)])
def test_while_batches_come_it_takes_a_share_of_the_time(lag_s: float, share: float) -> None:
    pace, now_s, recorded_s = RecordPace(), 100.0, 0.0
    while now_s < 110.0:
        pace.batches_came(now_s=now_s)
        if pace.wait_s(now_s=now_s) == 0:
            pace.recorded(started_s=now_s, ended_s=now_s + 0.001, lag_s=lag_s)
            now_s += 0.001
            recorded_s += 0.001
        now_s += 0.0001
    assert recorded_s / 10 == pytest.approx(share, rel=0.05)


def test_silence_is_used_whole() -> None:
    pace = RecordPace()
    pace.batches_came(now_s=100.0)
    pace.recorded(started_s=100.0, ended_s=100.1, lag_s=0.0)
    assert pace.wait_s(now_s=100.0) == pytest.approx(QUIET_S)
    assert pace.wait_s(now_s=100.0 + QUIET_S) == 0
