from mesh.breaker import CircuitBreaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened() -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    breaker = CircuitBreaker(clock, failures=2, rest_seconds=1.0)
    for _ in range(2):
        assert breaker.allows()
        breaker.failed()
    return breaker, clock


def test_failures_in_a_row_open_it() -> None:
    breaker, _ = opened()
    assert not breaker.allows()


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = CircuitBreaker(Clock(), failures=2, rest_seconds=1.0)
    for _ in range(5):
        breaker.failed()
        breaker.succeeded()
    assert breaker.allows()


def test_one_try_passes_in_each_period_while_it_is_open() -> None:
    breaker, clock = opened()
    clock.now = 1.0
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    breaker.failed()
    assert not breaker.allows()
    clock.now = 2.0
    assert breaker.allows()


def test_a_try_that_succeeds_closes_it() -> None:
    breaker, clock = opened()
    clock.now = 1.0
    assert breaker.allows()
    breaker.succeeded()
    assert all(breaker.allows() for _ in range(3))
