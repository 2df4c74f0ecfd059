from random import Random

import pytest

from eval import suite
from eval.suite import LENGTHS, Question, questions
from eval.tasks import LONG_TASKS, SHORT_TASKS
from eval.tasks.problem import Problem, is_held_out
from mesh.errors import ConfigError


def ids(asked: list[Question]) -> list[tuple[str, str]]:
    return [(question.id, question.digest) for question in asked]


def test_the_short_suite_asks_every_short_task_equally() -> None:
    asked = questions("short", seed=0, problems=3)
    assert [question.group for question in asked] == [name for name in SHORT_TASKS for _ in range(3)]


def test_the_long_suite_asks_every_long_task_at_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LENGTHS", {"1k": 1000, "2k": 2000})
    asked = questions("long", seed=0, long_problems=2)
    groups = [f"{task} {length}" for task in LONG_TASKS for length in ("1k", "2k")]
    assert [question.group for question in asked] == [group for group in groups for _ in range(2)]


def test_all_is_short_and_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LENGTHS", {"1k": 1000})
    both = questions("short", seed=0, problems=1) + questions("long", seed=0, long_problems=1)
    assert ids(questions("all", seed=0, problems=1, long_problems=1)) == ids(both)


def test_every_question_is_of_the_test_split() -> None:
    assert all(is_held_out(question.problem) for question in questions("short", seed=1, problems=4))


def test_equal_seeds_ask_the_same_and_others_do_not() -> None:
    first, again, other = (ids(questions("short", seed, problems=5)) for seed in (4, 4, 5))
    assert first == again
    assert not set(first) & set(other)


def test_fewer_problems_are_the_first_of_more() -> None:
    few, many = (questions("short", seed=0, problems=count) for count in (2, 6))
    assert set(ids(few)) < set(ids(many))


def test_no_problem_is_asked_twice() -> None:
    asked = questions("short", seed=0, problems=30)
    assert len({(question.group, question.problem.key) for question in asked}) == len(asked)


def test_questions_differ_by_text_and_expected_answer() -> None:
    def digest(prompt: str, answer: str) -> str:
        return Question("add/0", "add", Problem("add", "k", prompt, "", "", answer), 9).digest

    assert len({digest("1+1?", "2"), digest("1+1?", "3"), digest("1+2?", "3"), digest("1+1?2", "")}) == 4


def test_longer_prompts_are_about_as_long_as_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LENGTHS", {length: LENGTHS[length] for length in ("1k", "4k")})
    for question in questions("long", seed=0, long_problems=1):
        task, length = question.group.split()
        characters = LENGTHS[length] * suite.CHARACTERS_PER_TOKEN[task]
        assert len(question.problem.prompt) == pytest.approx(characters, rel=0.25)


def test_a_task_without_enough_problems_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(_: Random) -> Problem:
        return Problem("t", key, "p", "r", "r", "a")

    key = next(str(k) for k in range(1000) if is_held_out(Problem("t", str(k), "", "", "", "")))
    monkeypatch.setattr(suite, "SHORT_TASKS", {"t": constant})
    with pytest.raises(ConfigError, match="t has hardly more than 1 held-out problems"):
        questions("short", seed=0, problems=2)
