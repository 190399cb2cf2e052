"""A full waiting queue: which limit, and when to come again."""

import pytest

from reprise_core.requests import FinishReason
from reprise_scheduler.sched.backpressure import (
    DEFAULT_RETRY_S,
    MAX_RETRY_S,
    WINDOW_S,
    DrainRate,
    QueueFull,
    QueueLimit,
)
from support.sched_driver import Driver

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def test_the_rate_is_of_the_time_with_a_backlog() -> None:
    rate = DrainRate()
    assert rate.per_second(0.0) is None
    rate.backlog_began(1000.0)  # idle before, which says nothing of the engine
    for tenth in range(40):
        rate.left(1000.0 + tenth / 10)
    assert rate.per_second(1004.0) == pytest.approx(10.0)
    assert rate.retry_after_s(50, 1004.0) == pytest.approx(5.0)


def test_old_departures_leave_the_window_and_a_standstill_gives_the_longest_wait() -> None:
    rate = DrainRate()
    rate.backlog_began(0.0)
    rate.left(0.5)
    assert rate.per_second(WINDOW_S) == pytest.approx(1 / WINDOW_S)
    assert rate.per_second(WINDOW_S + 1) == 0
    assert rate.retry_after_s(3, WINDOW_S + 1) == MAX_RETRY_S


def test_the_answer_is_within_bounds_and_has_a_default() -> None:
    rate = DrainRate()
    assert rate.retry_after_s(9, 0.0) == DEFAULT_RETRY_S
    rate.backlog_began(0.0)
    assert rate.retry_after_s(9, 0.5) == DEFAULT_RETRY_S
    for _ in range(1000):
        rate.left(1.0)
    assert rate.retry_after_s(9, 2.0) == 1.0
    assert rate.retry_after_s(10**6, 2.0) == MAX_RETRY_S


def test_memory_is_bounded_whatever_the_rate() -> None:
    rate = DrainRate()
    rate.backlog_began(0.0)
    for millisecond in range(100_000):
        rate.left(millisecond / 1000)
    assert len(rate._left) <= WINDOW_S * 10 + 1
    assert rate.per_second(100.0) == pytest.approx(1000, rel=0.01)


def test_a_full_queue_names_its_limit_and_the_time_until_it_is_drained() -> None:
    driver = Driver(max_num_waiting=4, max_num_seqs=1)
    for i in range(4):
        driver.add(f"r{i}", [*PROMPT, i], max_tokens=1)
    for now_s in (2.0, 4.0):  # one request leaves every two seconds
        driver.execute(driver.scheduler.plan_step(now_s=now_s))
    for i in range(4, 6):
        driver.add(f"r{i}", PROMPT, arrival_s=4.0)
    with pytest.raises(QueueFull, match="4 requests wait, at most 4 may; try again in 8 s") as refused:
        driver.add("more", PROMPT, arrival_s=4.0)
    assert refused.value.limit is QueueLimit.REQUESTS
    assert refused.value.retry_after_s == pytest.approx(8.0)


def test_tokens_that_wait_are_limited_too_but_one_request_is_always_taken() -> None:
    driver = Driver(max_num_waiting_tokens=25, max_num_seqs=1)
    large = driver.add("large", [5] * 40)
    with pytest.raises(QueueFull, match="50 tokens would wait, at most 25 may") as refused:
        driver.add("a", PROMPT)
    assert refused.value.limit is QueueLimit.TOKENS
    driver.scheduler.finish(large, FinishReason.ABORT)
    driver.add("b", PROMPT)
    driver.add("c", PROMPT)
    with pytest.raises(QueueFull, match="30 tokens"):
        driver.add("d", PROMPT)
    driver.step()  # b runs and no longer waits
    driver.add("d", PROMPT)
    driver.run()
    assert driver.scheduler.num_waiting_tokens == 0


def test_a_preempted_request_waits_with_all_its_tokens() -> None:
    driver = Driver(num_blocks=8)
    driver.add("a", PROMPT, max_tokens=14)
    driver.add("b", PROMPT[::-1], max_tokens=14)
    while not driver.scheduler.counters.preemptions:
        driver.step()
    (waiting,) = driver.scheduler.waiting
    assert driver.scheduler.num_waiting_tokens == waiting.num_tokens > len(PROMPT)
    driver.run()
    assert driver.scheduler.num_waiting_tokens == 0
