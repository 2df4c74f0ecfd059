"""A compiled grammar, for all answers of a worker that it constrains, and where each answer is in it."""

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import TypeVar

from llguidance import LLMatcher

from mesh.errors import GrammarSpent, InvalidConstraint, MeshError
from mesh.text.grammars import complaint

ResultT = TypeVar("ResultT")


class SharedGrammar:
    """Copies of one matcher share the lexer of its expressions, which learns from each of them. If one copy makes it
    too complex, no copy can go on. The answer of that one ends; the others need a grammar that is compiled again.

    Several threads use it. A lock lets one call run at a time, so that it is known whose call made the lexer too
    complex.
    """

    def __init__(self, begin: LLMatcher) -> None:
        """begin: a matcher at the grammar's beginning, where it stays."""
        self._begin = begin
        self._lock = Lock()
        self._spent_by: object = None

    @property
    def is_spent(self) -> bool:
        copy = self.matcher()
        copy.compute_bitmask()
        return copy.is_error()

    def matcher(self) -> LLMatcher:
        """A new matcher at the grammar's beginning."""
        return self._begin.deep_copy()

    def run(self, answer: object, matcher: LLMatcher, call: Callable[[], ResultT]) -> ResultT:
        """The result of a call of the matcher, which is the answer's.

        Raises InvalidConstraint if the answer cannot go on, GrammarSpent if that is the fault of another.
        """
        with self._lock:
            result = call()
            if matcher.is_error():
                raise self._failure(answer, matcher.get_error())
        return result

    def _failure(self, answer: object, error: str) -> MeshError:
        if self.is_spent:
            self._spent_by = self._spent_by or answer
            if self._spent_by is not answer:
                return GrammarSpent("another answer made the lexer of this constraint too complex: place it again")
        return InvalidConstraint(f"the constraint cannot be followed: {complaint(error)}")


class GrammarPath:
    """Used by one thread at a time. Its methods raise InvalidConstraint if a call would take too long, or if the
    grammar does not allow a token, and GrammarSpent. After that only `go_back` helps.
    """

    def __init__(self, grammar: SharedGrammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._consumed: list[int] = []

    @property
    def tokens(self) -> int:
        """How many tokens have been consumed."""
        return len(self._consumed)

    def consume(self, token_id: int) -> None:
        self._consumed.append(token_id)
        self._grammar.run(self, self._matcher, partial(self._matcher.consume_token, token_id))

    def mask(self) -> bytes:
        """A bit for each token id, the lowest first, set where the grammar goes on with it."""
        return self._grammar.run(self, self._matcher, self._matcher.compute_bitmask)

    def go_back(self, tokens: int) -> None:
        """Go back to where this many tokens had been consumed."""
        gone = len(self._consumed) - tokens
        del self._consumed[tokens:]
        if self._matcher.is_error():
            # A matcher never leaves that state.
            self._matcher = self._grammar.matcher()
            self._grammar.run(self, self._matcher, partial(self._matcher.consume_tokens, self._consumed))
        elif gone:
            self._grammar.run(self, self._matcher, partial(self._matcher.rollback, gone))
