"""A problem with its solution, and how an answer to it is judged."""

import re
from dataclasses import dataclass
from hashlib import blake2b

# One problem in so many is held out for tests.
HELD_OUT_ONE_IN = 32
THINKING_ENDS = "</think>"
_BOLD = re.compile(r"\*\*(.+?)\*\*", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """What the user asks, and a worked solution."""

    task: str
    # The facts of the problem without its phrasing: it decides the split, so that no test problem is seen in training
    # in other words.
    key: str
    prompt: str
    # What stands in the thinking part.
    reasoning: str
    # What the user sees; the result stands in bold.
    reply: str
    # The result.
    answer: str


@dataclass(frozen=True)
class Fact:
    """What is to be found in a long text."""

    name: str
    content: str

    @property
    def key(self) -> str:
        """Names the problem that asks for it, whatever the text around."""
        return f"{self.name} {self.content}"


def bold(text: object) -> str:
    return f"**{text}**"


def is_held_out(problem: Problem) -> bool:
    """Whether the problem belongs to the test split; never true of a problem trained on."""
    return belongs_to_test(problem.task, problem.key)


def belongs_to_test(task: str, key: str) -> bool:
    """The split of a task's problem, by the hash of its key."""
    digest = blake2b(f"{task}/{key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def grade(problem: Problem, text: str) -> bool:
    """Whether `text` (a completion, with or without its thinking) states the problem's result exactly.

    The result is the last text in bold, or the whole visible text where nothing is bold; white space does not count,
    nor does a final full stop.
    """
    return _result(text) == _normal(problem.answer)


def _result(text: str) -> str:
    visible = text.rpartition(THINKING_ENDS)[2]
    marked = _BOLD.findall(visible)
    return _normal(marked[-1] if marked else visible)


def _normal(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")
