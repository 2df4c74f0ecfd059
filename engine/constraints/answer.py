"""One constrained answer: which tokens may come next."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from mesh.domain.constraints import Constraint
from mesh.errors import InvalidConstraint
from mesh.grammars import complaint

# A bit for each token id, the lowest first, up to the vocabulary's last byte.
Bits = npt.NDArray[np.uint8]


class ConstrainedAnswer:
    """Follows an answer through its free tokens and then through its grammar. Used by one thread at a time."""

    def __init__(
        self,
        constraint: Constraint,
        matcher: LLMatcher | None,
        vocabulary_size: int,
        eos_token_ids: frozenset[int],
        stop_token_ids: frozenset[int],
    ) -> None:
        """matcher: at the grammar's begin, if there is one.

        eos_token_ids: end the answer where the grammar lets it end; stop_token_ids: these and others end it too.
        """
        self._constraint = constraint
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._stop_token_ids = stop_token_ids
        self._bytes = -(-vocabulary_size // 8)
        self._any = _bits(vocabulary_size)
        self._unended = _bits(vocabulary_size, eos_token_ids)
        # The next token decides whether some are free.
        self._may_open = constraint.opened_by is not None
        self._free = matcher is None or (constraint.free_until is not None and not self._may_open)
        self._tokens = 0
        # The latest tokens, as many as a banned sequence can begin with.
        self._last: tuple[int, ...] = ()
        self._remembered = max(map(len, constraint.banned), default=1) - 1

    def advance(self, token_ids: Sequence[int]) -> None:
        """The answer has gone on with these. Raises InvalidConstraint if it could not."""
        for token_id in token_ids:
            self._tokens += 1
            self._last = (*self._last, token_id)[-self._remembered :] if self._remembered else ()
            self._follow(token_id)

    def mask(self) -> Bits | None:
        """What the next token may be; None if it may be any. Raises InvalidConstraint if that takes too long."""
        allowed, forbidden = self._allowed(), self._forbidden()
        if not forbidden:
            return allowed
        left = (self._any if allowed is None else allowed).copy()
        for token_id in forbidden:
            left[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
        # Where nothing else is left the grammar decides.
        return left if left.any() else allowed

    def _follow(self, token_id: int) -> None:
        if self._may_open:
            self._may_open = False
            self._free = token_id == self._constraint.opened_by
            if self._free:
                return
        if self._free:
            self._free = self._matcher is None or token_id != self._constraint.free_until
        elif self._matcher is not None and token_id not in self._eos_token_ids:
            self._matcher.consume_token(token_id)
            self._check(self._matcher)

    def _allowed(self) -> Bits | None:
        """By the grammar."""
        if self._matcher is None:
            return None
        if self._free:
            return None if self._constraint.may_end_free else self._unended
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8, self._bytes)
        self._check(self._matcher)
        opening = self._constraint.opened_by
        if self._may_open and opening is not None:
            bits = bits.copy()
            bits[opening // 8] |= 1 << opening % 8
        return bits

    def _forbidden(self) -> set[int]:
        """Tokens that would end the answer too early, or complete a banned sequence."""
        early = self._tokens < self._constraint.min_tokens
        forbidden = set(self._stop_token_ids) if early else set()
        for *begin, last in self._constraint.banned:
            if not begin or self._last[-len(begin) :] == tuple(begin):
                forbidden.add(last)
        return forbidden

    def _check(self, matcher: LLMatcher) -> None:
        if matcher.is_error():
            raise InvalidConstraint(f"the constraint cannot be followed: {complaint(matcher.get_error())}")


def _bits(vocabulary_size: int, without: frozenset[int] = frozenset()) -> Bits:
    allowed = np.ones(vocabulary_size, np.uint8)
    allowed[[*without]] = 0
    return np.packbits(allowed, bitorder="little")
