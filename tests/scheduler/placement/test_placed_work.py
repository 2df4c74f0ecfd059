from hypothesis import given
from hypothesis import strategies as st

from scheduler.placement.placed_work import Ends

# Which request, and when it ends; None takes it out.
changes = st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 3).map(float)), max_size=30)


@given(changes, st.integers(0, 4))
def test_ends_are_those_that_were_added_and_not_taken_out(changes: list[tuple[int, float | None]], time: int) -> None:
    ends, expected = Ends(), dict[int, float]()
    for number, ends_at in changes:
        if ends_at is None:
            ends.remove((str(number), 0))
            expected.pop(number, None)
        else:
            ends.add((str(number), 0), ends_at)
            expected[number] = ends_at
    assert ends.first(3) == sorted(expected.values())[:3]
    ends.forget_before(float(time))
    left = [ends_at for ends_at in expected.values() if ends_at >= time]
    assert (ends.first(30), len(ends)) == (sorted(left), len(left))
