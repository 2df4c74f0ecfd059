import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from scheduler.placement.placed_work import Answer, Answers, placed_answers

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


@given(st.lists(st.lists(times, max_size=5), min_size=1, max_size=3))
def test_answers_of_several_ranks_are_one_ascending_list(begins: list[list[float]]) -> None:
    placed = placed_answers([holding(each) for each in begins])
    assert [*placed.begins.times] == sorted(begin for each in begins for begin in each)
    assert [*placed.ends.times] == sorted(begin + 1 for each in begins for begin in each)


def test_an_answer_that_a_decision_keeps_takes_32_bytes() -> None:
    """The log of decisions keeps 500,000 of them, so as lists they would take 40 MB in place of 16."""
    answers, count = holding([float(number) for number in range(1000)]), 20
    tracemalloc.start()
    try:
        kept = [placed_answers([answers]) for _ in range(count)]
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 32 * 1000 * len(kept) <= size_bytes < 36 * 1000 * len(kept)


def holding(begins: list[float]) -> Answers:
    answers = Answers()
    for number, begin in enumerate(begins):
        answers.add((str(number), 0), Answer(begin, begin + 1, begin + 2))
    return answers
