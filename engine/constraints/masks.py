"""The masks of one request, made while the device computes the step before their draws, or the layers before these."""

import logging
from collections.abc import Sequence
from concurrent.futures import Executor, Future

from engine.constraints.answer import Bits, ConstrainedAnswer, Masks
from mesh.errors import InvalidConstraint, MeshError

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
        """The answer went on with these tokens, and these are guessed behind them: begin to make the masks of a row
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
