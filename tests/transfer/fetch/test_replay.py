from hypothesis import given
from hypothesis import strategies as st

from transfer.fetch.replay import WINDOW, ReplayWindow


@given(st.lists(st.integers(1, 3 * WINDOW), max_size=300))
def test_no_number_is_accepted_twice(numbers: list[int]) -> None:
    window = ReplayWindow()
    taken = [number for number in numbers if window.accept(number)]
    assert len(taken) == len(set(taken))


@given(st.permutations(range(1, 200)))
def test_nearby_numbers_are_accepted_in_any_order(numbers: list[int]) -> None:
    window = ReplayWindow()
    assert all(window.accept(number) for number in numbers)


def test_a_number_much_older_than_the_newest_is_refused() -> None:
    window = ReplayWindow()
    assert window.accept(5 * WINDOW)
    assert not window.accept(4 * WINDOW)
    assert window.accept(4 * WINDOW + 1)


def test_what_is_remembered_stays_bounded_and_still_refuses() -> None:
    window = ReplayWindow()
    assert all(window.accept(number) for number in range(1, 10 * WINDOW))
    assert not any(window.accept(number) for number in range(1, 10 * WINDOW))
