"""The masks of one request, each made while the step before its draw is computed."""

from collections.abc import Sequence
from concurrent.futures import Executor, Future

from engine.constraints.answer import Bits, ConstrainedAnswer
from mesh.errors import InvalidConstraint


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
        try:
            return pending.result()
        except InvalidConstraint as error:
            self.failure = error
            return None

    def _step(self, token_ids: Sequence[int]) -> Bits | None:
        self._answer.advance(token_ids)
        return self._answer.mask()
