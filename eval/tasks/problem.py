"""A problem with its solution, and how an answer to it is judged."""

import re
from dataclasses import dataclass
from hashlib import blake2b

# One problem in this many is held out for tests.
HELD_OUT_ONE_IN = 32
THINKING_ENDS = "</think>"
_BOLD = re.compile(r"\*\*(.+?)\*\*", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """The user's question and a worked solution."""

    task: str
    # The facts of the problem without its phrasing. They decide the split, so that training has no test problem in
    # other words.
    key: str
    prompt: str
    # The text of the thinking part.
    reasoning: str
    # The text that the user sees, with the result in bold.
    reply: str
    # The result.
    answer: str


@dataclass(frozen=True)
class Fact:
    """A fact that is to be found in a long text."""

    name: str
    content: str

    @property
    def key(self) -> str:
        """The key of problems that ask for this fact. It does not depend on the text around the fact."""
        return f"{self.name} {self.content}"


def bold(text: object) -> str:
    return f"**{text}**"


def is_held_out(problem: Problem) -> bool:
    """Whether the problem belongs to the test split. No problem of the training data does."""
    return belongs_to_test(problem.task, problem.key)


def belongs_to_test(task: str, key: str) -> bool:
    """Whether a task's problem belongs to the test split, decided by the hash of its key."""
    digest = blake2b(f"{task}/{key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def grade(problem: Problem, text: str) -> bool:
    """Whether `text` (a completion, with or without its thinking) states the problem's result exactly.

    The result is the last text in bold, or the whole visible text if nothing is bold. White space and a final full stop
    do not count.
    """
    return _result(text) == _normal(problem.answer)


def _result(text: str) -> str:
    visible = text.rpartition(THINKING_ENDS)[2]
    marked = _BOLD.findall(visible)
    return _normal(marked[-1] if marked else visible)


def _normal(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")
