"""Where an answer is in its grammar, with the way back that it came."""

from llguidance import LLMatcher

from mesh.errors import InvalidConstraint
from mesh.grammars import complaint


class GrammarPath:
    """Used by one thread at a time. Its methods raise InvalidConstraint if that would take too long, or a token is not
    what the grammar allows; then only going back helps.
    """

    def __init__(self, begin: LLMatcher) -> None:
        """begin: at the grammar's begin, where it stays; others may have it too."""
        self._begin = begin
        self._matcher = begin.deep_copy()
        self._consumed: list[int] = []

    @property
    def tokens(self) -> int:
        """How many have been consumed."""
        return len(self._consumed)

    def consume(self, token_id: int) -> None:
        self._consumed.append(token_id)
        self._matcher.consume_token(token_id)
        self._check()

    def mask(self) -> bytes:
        """A bit for each token id, the lowest first, set where the grammar goes on with it."""
        bits = self._matcher.compute_bitmask()
        self._check()
        return bits

    def go_back(self, tokens: int) -> None:
        """To where so many had been consumed."""
        gone = len(self._consumed) - tokens
        del self._consumed[tokens:]
        if self._matcher.is_error():
            # That is a state which a matcher never leaves.
            self._matcher = self._begin.deep_copy()
            self._matcher.consume_tokens(self._consumed)
        elif gone:
            self._matcher.rollback(gone)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidConstraint(f"the constraint cannot be followed: {complaint(self._matcher.get_error())}")
