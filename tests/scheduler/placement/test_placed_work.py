from hypothesis import given
from hypothesis import strategies as st

from scheduler.placement.placed_work import Answer, Answers

times = st.integers(0, 3).map(float)
# Which request, and its answer; None takes it out.
changes = st.lists(st.tuples(st.integers(0, 5), st.none() | st.builds(Answer, times, times, times)), max_size=30)


@given(changes, st.integers(0, 4))
def test_answers_are_those_added_and_not_taken_out(changes: list[tuple[int, Answer | None]], time: int) -> None:
    answers, expected = Answers(), dict[int, Answer]()
    for number, answer in changes:
        if answer is None:
            answers.remove((str(number), 0))
            expected.pop(number, None)
        else:
            answers.add((str(number), 0), answer)
            expected[number] = answer
    assert answers.latest_ends == sorted(answer.latest_at for answer in expected.values())
    answers.forget_before(float(time))
    left = [answer for answer in expected.values() if answer.latest_at >= time]
    assert len(answers) == len(left)
    assert answers.begins == sorted(answer.begins_at for answer in left)
    assert answers.expected_ends == sorted(answer.expected_at for answer in left)
    assert answers.latest_ends == sorted(answer.latest_at for answer in left)
