from gateway.account import KEPT, Answer, RecentAnswers


def answer(number: int) -> Answer:
    return Answer(float(number), 1.0, 2.0, 3, 0, 4, "finished")


def test_a_reader_gets_what_came_since_it_last_read() -> None:
    answers = RecentAnswers()
    answers.add(answer(1))
    seen = answers.count
    answers.add(answer(2))
    assert answers.after(0) == [answer(1), answer(2)]
    assert answers.after(seen) == [answer(2)]
    assert answers.after(answers.count) == []


def test_a_late_reader_gets_the_newest() -> None:
    answers = RecentAnswers()
    for number in range(KEPT + 5):
        answers.add(answer(number))
    assert answers.after(0)[0] == answer(5)
    assert len(answers.after(0)) == KEPT
