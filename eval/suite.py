"""The questions of a suite. They are drawn from the tasks' held-out problems, and are the same for equal seeds."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import product
from random import Random
from types import MappingProxyType
from typing import Literal

from eval.tasks import LONG_TASKS, SHORT_TASKS, Problem, draw, draw_long
from mesh.errors import ConfigError

SuiteName = Literal["short", "long", "all"]

# Tokens of a long problem's prompt. The longest leaves room for the answer in a context of 16,384 tokens.
LENGTHS: Mapping[str, int] = MappingProxyType({"1k": 1000, "2k": 2000, "4k": 4000, "8k": 8000, "16k": 15_000})
# Characters per token with tiny-r1's tokenizer, which turn a length in tokens into one in characters. They are used for
# every model, so that all are asked the same questions. The report has the prompts' real lengths.
CHARACTERS_PER_TOKEN: Mapping[str, float] = MappingProxyType({"needle": 3.88, "key_value": 1.43, "copy_section": 3.69})
SHORT_PROBLEMS, LONG_PROBLEMS = 50, 20
SHORT_ANSWER_TOKENS, LONG_ANSWER_TOKENS = 1024, 512
# Draws in a row that repeat an earlier problem before a task counts as exhausted.
MOST_REPEATS = 500


@dataclass(frozen=True)
class Question:
    """One problem as it is asked."""

    # Such as "add/7" or "needle 8k/0".
    id: str
    # Questions of a group are reported together. A group is a task, and for long tasks also a length.
    group: str
    problem: Problem
    max_tokens: int

    @property
    def digest(self) -> str:
        """A digest of the prompt and the expected answer: problems with equal digests are the same."""
        content = f"{self.problem.prompt}\0{self.problem.answer}"
        return blake2b(content.encode(), digest_size=6).hexdigest()


def questions(
    suite: SuiteName,
    seed: int,
    *,
    problems: int = SHORT_PROBLEMS,
    long_problems: int = LONG_PROBLEMS,
    max_tokens: int | None = None,
) -> list[Question]:
    """`problems` of each short task, `long_problems` of each long task and length, in that order.

    With smaller numbers the questions are the first of those with larger ones. Raises ConfigError if a task has fewer
    problems.
    """
    asked: list[Question] = []
    if suite != "long":
        for name in SHORT_TASKS:
            drawn = _distinct(name, partial(draw, SHORT_TASKS[name], held_out=True), seed, problems)
            asked += _group(name, drawn, max_tokens or SHORT_ANSWER_TOKENS)
    if suite != "short":
        for name, length in product(LONG_TASKS, LENGTHS):
            characters = round(LENGTHS[length] * CHARACTERS_PER_TOKEN[name])
            draw_one = partial(draw_long, LONG_TASKS[name], characters=characters, held_out=True)
            drawn = _distinct(f"{name} {length}", draw_one, seed, long_problems)
            asked += _group(f"{name} {length}", drawn, max_tokens or LONG_ANSWER_TOKENS)
    return asked


def _group(name: str, problems: Iterator[Problem], max_tokens: int) -> Iterator[Question]:
    return (Question(f"{name}/{index}", name, problem, max_tokens) for index, problem in enumerate(problems))


def _distinct(group: str, draw_one: Callable[[Random], Problem], seed: int, count: int) -> Iterator[Problem]:
    """Problems with different keys, because asking one twice would make the score look more certain than it is."""
    # Random takes the text's content as its seed, so that every process draws the same.
    random = Random(f"{seed}/{group}")
    seen: set[str] = set()
    repeats = 0
    while len(seen) < count:
        problem = draw_one(random)
        if problem.key in seen:
            repeats += 1
            if repeats == MOST_REPEATS:
                raise ConfigError(f"{group} has hardly more than {len(seen)} held-out problems: ask for fewer problems")
            continue
        repeats = 0
        seen.add(problem.key)
        yield problem
