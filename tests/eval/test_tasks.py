"""The tasks: their problems, solutions and judgement."""

import re
from fractions import Fraction
from random import Random

import pytest

from eval.tasks import LONG_TASKS, SHORT_TASKS, Problem, draw, draw_long, grade
from eval.tasks.calculation import difference, product, quotient, total
from eval.tasks.problem import is_held_out

CALCULATION = re.compile(r"[\d+*/-]+(?:=[\d+*/-]+)+")
TERM = re.compile(r"(-?\d+)(?:([*/])(\d+))?")


def value(expression: str) -> Fraction:
    """The value of a sum of products and quotients, such as "12*4-3"."""
    terms = re.split(r"(?<=\d)(?=[+-])", expression)
    return sum((_term(term.removeprefix("+")) for term in terms), Fraction(0))


def _term(term: str) -> Fraction:
    match = TERM.fullmatch(term)
    assert match, term
    number, operator, other = match.groups()
    if operator is None:
        return Fraction(int(number))
    return Fraction(int(number)) * int(other) if operator == "*" else Fraction(int(number), int(other))


def all_equal(chain: str) -> bool:
    return len({value(part) for part in chain.split("=")}) == 1


def make_problem(answer: str, reply: str = "") -> Problem:
    return Problem(task="add", key="1+1", prompt="?", reasoning="", reply=reply, answer=answer)


@pytest.mark.parametrize("name", SHORT_TASKS)
def test_a_short_tasks_own_solution_is_right(name: str) -> None:
    random = Random(name)
    for _ in range(30):
        problem = SHORT_TASKS[name](random)
        assert problem.task == name
        assert grade(problem, f"{problem.reasoning}</think>{problem.reply}")
        assert not grade(problem, f"{problem.reasoning}</think>")


@pytest.mark.parametrize("name", LONG_TASKS)
@pytest.mark.parametrize("characters", [3000, 20_000])
def test_a_long_problem_has_its_length_and_answer(name: str, characters: int) -> None:
    problem = draw_long(LONG_TASKS[name], Random(1), characters, held_out=True)
    assert 0.75 * characters < len(problem.prompt) < 1.25 * characters
    assert problem.answer in problem.prompt
    assert grade(problem, problem.reply)


@pytest.mark.parametrize("name", SHORT_TASKS)
@pytest.mark.parametrize("held_out", [True, False])
def test_a_drawn_problem_is_of_the_wished_split(name: str, held_out: bool) -> None:
    random = Random(2)
    assert all(is_held_out(draw(SHORT_TASKS[name], random, held_out=held_out)) == held_out for _ in range(5))


def test_a_long_problems_split_ignores_the_text_around() -> None:
    task = LONG_TASKS["needle"]
    fact = task.fact(Random(3))
    short, long = (task.around(Random(characters), fact, characters) for characters in (1000, 5000))
    assert short.key == long.key
    assert is_held_out(short) == is_held_out(long)


def test_equal_seeds_make_equal_problems() -> None:
    for task in SHORT_TASKS.values():
        assert task(Random(7)) == task(Random(7))


@pytest.mark.parametrize("name", ["word_problem", "convert_units", "divide"])
def test_every_calculation_in_the_reasoning_is_right(name: str) -> None:
    random = Random(4)
    for _ in range(200):
        reasoning = SHORT_TASKS[name](random).reasoning
        chains = CALCULATION.findall(reasoning)
        # A quotient digit of a long division is rounded down: only its exact parts are checked.
        exact = [chain for chain in chains if "/" not in chain]
        assert exact
        assert all(map(all_equal, exact))


@pytest.mark.parametrize("a", [0, 7, 40, 83, 156])
@pytest.mark.parametrize("b", [0, 5, 30, 37, 78])
def test_small_calculations_end_in_the_result(a: int, b: int) -> None:
    larger, smaller = max(a, b), min(a, b)
    for chain, result in (
        (total(a, b), a + b),
        (product(a, b), a * b),
        (difference(larger, smaller), larger - smaller),
    ):
        assert all_equal(chain)
        assert chain.endswith(f"={result}")


def test_a_quotient_takes_tens_first_and_ends_in_the_remainder() -> None:
    assert quotient(237, 12) == "10*12=120, 237-120=117\n9*12=108, 117-108=9"


@pytest.mark.parametrize(
    "text", ["**12**", "It is **12**.", "thought **9**</think>so **12**", "first **3**, then **12**", "12."]
)
def test_a_result_is_found_after_the_thinking(text: str) -> None:
    assert grade(make_problem("12"), text)


@pytest.mark.parametrize("text", ["**12**</think>**13**", "It is 12", "**12, 13**", ""])
def test_another_result_is_wrong_whatever_stands_around(text: str) -> None:
    assert not grade(make_problem("12"), text)
