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
        self, constraint: Constraint, matcher: LLMatcher, vocabulary_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        """matcher: at the grammar's begin; eos_token_ids: end the answer where the grammar lets it end."""
        self._constraint = constraint
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._bytes = -(-vocabulary_size // 8)
        self._unended = _all_but(vocabulary_size, eos_token_ids)
        # The next token decides whether some are free.
        self._may_open = constraint.opened_by is not None
        self._free = constraint.free_until is not None and not self._may_open

    def advance(self, token_ids: Sequence[int]) -> None:
        """The answer has gone on with these. Raises InvalidConstraint if it could not."""
        for token_id in token_ids:
            if self._may_open:
                self._may_open = False
                self._free = token_id == self._constraint.opened_by
                if self._free:
                    continue
            if self._free:
                self._free = token_id != self._constraint.free_until
            elif token_id not in self._eos_token_ids:
                self._matcher.consume_token(token_id)
                self._check()

    def mask(self) -> Bits | None:
        """What the next token may be; None if it may be any. Raises InvalidConstraint if that takes too long."""
        if self._free:
            return None if self._constraint.may_end_free else self._unended
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8, self._bytes)
        self._check()
        if self._may_open:
            bits = bits.copy()
            _allow(bits, self._constraint.opened_by)
        return bits

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidConstraint(f"the constraint cannot be followed: {complaint(self._matcher.get_error())}")


def _all_but(vocabulary_size: int, token_ids: frozenset[int]) -> Bits:
    allowed = np.ones(vocabulary_size, np.uint8)
    allowed[[*token_ids]] = 0
    return np.packbits(allowed, bitorder="little")


def _allow(bits: Bits, token_id: int | None) -> None:
    if token_id is not None:
        bits[token_id // 8] |= 1 << token_id % 8
