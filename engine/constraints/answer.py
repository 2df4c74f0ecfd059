"""One constrained answer: which tokens may come next."""

import logging
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.constraints.grammar import GrammarPath, SharedGrammar
from mesh.domain.constraints import Constraint
from mesh.errors import InvalidConstraint, MeshError

# A bit for each token id, the lowest first, up to the vocabulary's last byte.
Bits = npt.NDArray[np.uint8]


class Masks(NamedTuple):
    """What a row may draw."""

    # After the answer so far and then after each draft: None where that may be any token. They end with the first
    # draft that is not allowed in its place, or that ends the answer: draws after it are discarded.
    allowed: Sequence[Bits | None]
    # Why there are no more masks, if because of an error: an answer that gets more tokens than masks cannot go on.
    error: MeshError | None = None


class _Place(NamedTuple):
    """How far an answer is, besides where it is in its grammar."""

    # Whether the next token decides if free tokens follow.
    may_open: bool
    # Whether tokens need not follow the grammar yet.
    free: bool
    tokens: int = 0
    # The latest tokens, as many as a banned sequence can begin with.
    last: tuple[int, ...] = ()


class ConstrainedAnswer:
    """Follows an answer through its free tokens and then through its grammar. Used by one thread at a time."""

    def __init__(
        self,
        constraint: Constraint,
        grammar: SharedGrammar | None,
        vocabulary_size: int,
        eos_token_ids: frozenset[int],
        stop_token_ids: frozenset[int],
    ) -> None:
        """eos_token_ids: end the answer where the grammar lets it end; stop_token_ids: these and others end it too."""
        self._constraint = constraint
        self._path = None if grammar is None else GrammarPath(grammar)
        self._eos_token_ids = eos_token_ids
        self._stop_token_ids = stop_token_ids
        self._bytes = -(-vocabulary_size // 8)
        self._any = _bits(vocabulary_size)
        self._unended = _bits(vocabulary_size, eos_token_ids)
        may_open = constraint.opened_by is not None
        self._place = _Place(may_open, free=constraint.free_until is not None and not may_open)
        self._remembered = max(map(len, constraint.banned), default=1) - 1

    def advance(self, token_ids: Sequence[int]) -> None:
        """The answer has gone on with these. Raises InvalidConstraint if it could not, and GrammarSpent."""
        for token_id in token_ids:
            self._follow(token_id)

    def masks(self, drafts: Sequence[int] = ()) -> Masks:
        """The masks of a row that draws after the answer so far and after each of the drafts.

        Raises InvalidConstraint or GrammarSpent if the answer cannot go on whatever it draws.
        """
        place, tokens = self._place, 0 if self._path is None else self._path.tokens
        allowed: list[Bits | None] = []
        error: MeshError | None = None
        try:
            allowed.append(self._mask())
            for draft in drafts:
                if draft in self._stop_token_ids or not _allows(allowed[-1], draft):
                    break
                self._follow(draft)
                allowed.append(self._mask())
        except MeshError as failed:
            # The answer may well go on without these drafts.
            error = failed
        self._place = place
        if self._path is not None:
            self._path.go_back(tokens)
        return Masks(allowed, error)

    def _follow(self, token_id: int) -> None:
        constraint, place = self._constraint, self._place
        free = place.free
        if place.may_open and token_id == constraint.opened_by:
            free = True
        elif free:
            free = token_id != constraint.free_until
        elif self._path is not None and token_id not in self._eos_token_ids:
            self._path.consume(token_id)
        last = (*place.last, token_id)[-self._remembered :] if self._remembered else ()
        self._place = _Place(may_open=False, free=free, tokens=place.tokens + 1, last=last)

    def _mask(self) -> Bits | None:
        """What the next token may be; None if it may be any. Raises as `masks`."""
        allowed, forbidden = self._allowed(), self._forbidden()
        if not forbidden:
            return allowed
        left = (self._any if allowed is None else allowed).copy()
        for token_id in forbidden:
            left[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
        # If bans leave no token, the grammar alone decides.
        return left if left.any() else allowed

    def _allowed(self) -> Bits | None:
        """What the grammar allows next; None if any token."""
        if self._path is None:
            return None
        if self._place.free:
            return None if self._constraint.may_end_free else self._unended
        bits = np.frombuffer(self._path.mask(), np.uint8, self._bytes)
        opening = self._constraint.opened_by
        if self._place.may_open and opening is not None:
            bits = bits.copy()
            bits[opening // 8] |= 1 << opening % 8
        return bits

    def _forbidden(self) -> set[int]:
        """Tokens that would end the answer too early, or complete a banned sequence."""
        early = self._place.tokens < self._constraint.min_tokens
        forbidden = set(self._stop_token_ids) if early else set()
        for *begin, last in self._constraint.banned:
            if not begin or self._place.last[-len(begin) :] == tuple(begin):
                forbidden.add(last)
        return forbidden


def _allows(allowed: Bits | None, token_id: int) -> bool:
    return allowed is None or bool(allowed[token_id // 8] >> token_id % 8 & 1)


def _bits(vocabulary_size: int, without: frozenset[int] = frozenset()) -> Bits:
    allowed = np.ones(vocabulary_size, np.uint8)
    allowed[[*without]] = 0
    return np.packbits(allowed, bitorder="little")


_log = logging.getLogger("deepmesh.engine")


def in_words(error: BaseException) -> MeshError:
    """The error as the client is told. The grammar library may fail in ways that it does not document, such as a panic.
    Such a failure is logged, and does not affect other requests.
    """
    if isinstance(error, MeshError):
        return error
    _log.error("a grammar failed", exc_info=error)
    return InvalidConstraint(f"the constraint cannot be followed: its grammar failed ({type(error).__name__})")


class AnswerMasks:
    """An `engine.batch.TokenMasks`. `follow` is called for all tokens that the request gets, before its next draw."""

    def __init__(self, answer: ConstrainedAnswer, thread: Executor) -> None:
        """thread: where all masks are made, in order."""
        self._answer = answer
        self._thread = thread
        self._next = thread.submit(answer.masks)
        # The masks of the row that was drawn last.
        self._drawn = Masks(())

    def follow(self, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """The answer went on with these tokens, and these are guessed after them: begin to make the masks of a row
        that verifies them, or the first of them.
        """
        self._next = self._thread.submit(self._step, token_ids, drafts)

    def wait(self) -> Sequence[Bits | None]:
        pending: Future[Masks] = self._next
        error = pending.exception()
        self._drawn = pending.result() if error is None else Masks((), in_words(error))
        return self._drawn.allowed

    def failure(self, tokens: int) -> MeshError | None:
        """Why the answer cannot go on with this many tokens of the row drawn last, so that they are worthless; None if
        it can.
        """
        return self._drawn.error if tokens > len(self._drawn.allowed) else None

    def _step(self, token_ids: Sequence[int], drafts: Sequence[int]) -> Masks:
        self._answer.advance(token_ids)
        return self._answer.masks(drafts)
