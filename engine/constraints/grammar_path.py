"""Where an answer is in its grammar, and which tokens led there, so that it can go back."""

from functools import partial

from engine.constraints.shared_grammar import SharedGrammar


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
