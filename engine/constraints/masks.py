"""The masks of one request, each made while the step before its draw is computed."""

import logging
from collections.abc import Sequence
from concurrent.futures import Executor, Future

from engine.constraints.answer import Bits, ConstrainedAnswer
from mesh.errors import InvalidConstraint

_log = logging.getLogger("deepmesh.engine")


def in_words(error: BaseException) -> InvalidConstraint:
    """What the client is told. The grammars' library may fail in ways that it does not tell of, a panic among them: it
    is logged then, and no other request has to do with it.
    """
    if isinstance(error, InvalidConstraint):
        return error
    _log.error("a grammar failed", exc_info=error)
    return InvalidConstraint(f"the constraint cannot be followed: its grammar failed ({type(error).__name__})")


class AnswerMasks:
    """engine.batch.TokenMask. `follow` is called for each token that the request gets, before its next draw.

    Attributes:
        failure: why its answer cannot go on; what was drawn since then is worthless.
    """

    def __init__(self, answer: ConstrainedAnswer, thread: Executor) -> None:
        """thread: where all masks are made, in order."""
        self._answer = answer
        self._thread = thread
        self._next = thread.submit(answer.mask)
        self.failure: InvalidConstraint | None = None

    def follow(self, token_ids: Sequence[int]) -> None:
        """The answer went on with these: begin to make the mask behind them."""
        self._next = self._thread.submit(self._step, token_ids)

    def wait(self) -> Bits | None:
        """What the next token may be; None if it may be any."""
        pending: Future[Bits | None] = self._next
        error = pending.exception()
        if error is None:
            return pending.result()
        self.failure = in_words(error)
        return None

    def _step(self, token_ids: Sequence[int]) -> Bits | None:
        self._answer.advance(token_ids)
        return self._answer.mask()
