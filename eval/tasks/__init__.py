"""The tasks by name: short ones, whose problems fit in a few hundred tokens, and long ones of any length."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from eval.tasks import arithmetic, copying, counting, lists, retrieval, strings, units, word_problems
from eval.tasks.problem import Fact, Problem, belongs_to_test, grade, is_held_out

__all__ = ["LONG_TASKS", "SHORT_TASKS", "Fact", "LongTask", "Problem", "ShortTask", "draw", "draw_long", "grade"]

ShortTask = Callable[[Random], Problem]


@dataclass(frozen=True)
class LongTask:
    """A task about a fact in a text of any length."""

    name: str
    fact: Callable[[Random], Fact]
    # The last argument is the length of the prompt in characters, which is met to within a few hundred.
    around: Callable[[Random, Fact, int], Problem]


SHORT_TASKS: Mapping[str, ShortTask] = MappingProxyType(
    {
        "add": arithmetic.add,
        "subtract": arithmetic.subtract,
        "multiply": arithmetic.multiply,
        "divide": arithmetic.divide,
        "sort_numbers": lists.sort_numbers,
        "sort_words": lists.sort_words,
        "reverse_list": lists.reverse_list,
        "count_letter": counting.count_letter,
        "count_item": counting.count_item,
        "convert_units": units.convert_units,
        "word_problem": word_problems.word_problem,
        "reverse_string": strings.reverse_string,
        "edit_string": strings.edit_string,
        "copy_text": copying.copy_text,
        "look_up": retrieval.look_up,
    }
)
LONG_TASKS: Mapping[str, LongTask] = MappingProxyType(
    {
        "needle": LongTask("needle", retrieval.fact, retrieval.needle),
        "key_value": LongTask("key_value", retrieval.fact, retrieval.key_value),
        "copy_section": LongTask("copy_section", copying.section, copying.copy_section),
    }
)


def draw(task: ShortTask, random: Random, *, held_out: bool) -> Problem:
    """A problem of the test split (`held_out`) or of the training split."""
    while is_held_out(problem := task(random)) != held_out:
        pass
    return problem


def draw_long(task: LongTask, random: Random, characters: int, *, held_out: bool) -> Problem:
    """As `draw`, with a prompt of about `characters` characters."""
    while belongs_to_test(task.name, (fact := task.fact(random)).key) != held_out:
        pass
    return task.around(random, fact, characters)
