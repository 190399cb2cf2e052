"""The circuit breaker, with a clock of the test's."""

from reprise_store.breaker import BreakerState, CircuitBreaker


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_story() -> None:
    clock = Clock()
    breaker = CircuitBreaker(failures=3, cooldown_s=2.0, clock=clock)
    assert not breaker.failed()
    assert not breaker.failed()
    assert not breaker.succeeded()  # In a row means in a row.
    assert not breaker.failed()
    assert not breaker.failed()
    assert breaker.closed
    assert breaker.failed()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.try_probe()
    clock.now_s += 1.9
    assert not breaker.try_probe()
    clock.now_s += 0.1
    assert breaker.try_probe()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.try_probe(), "one probe at a time"
    assert not breaker.failed()
    assert breaker.state is BreakerState.OPEN
    clock.now_s += 2
    assert breaker.try_probe()
    assert breaker.succeeded()
    assert breaker.closed
    assert not breaker.failed(), "the count begins anew"


def test_late_failures_of_earlier_calls_start_the_cooldown_again() -> None:
    clock = Clock()
    breaker = CircuitBreaker(failures=1, cooldown_s=1.0, clock=clock)
    breaker.failed()
    clock.now_s += 0.9
    breaker.failed()
    clock.now_s += 0.9
    assert not breaker.try_probe()
