"""Decode steps of the product's engine that are taken together, with the same result as one after the other."""

from collections.abc import Mapping, Sequence

from engine.engine import Engine
from engine.protocol.messages import StepResult
from engine.requests.request import Request
from mesh.blocks import BLOCK_TOKENS
from sim.device import END_OF_SEQUENCE

# Most steps that are looked ahead: the work for more is often lost because something arrives in between.
MOST_STEPS = 256


class QuietSteps:
    """`ahead` says how many of the engine's next steps bring each decoding request one token, and nothing else; `take`
    takes them.

    All these steps have the same rows until a request arrives, begins to decode or ends. The tokens are known
    beforehand, since they count down (see sim.device).
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # The requests of the steps taken last; and, once a later step has begun, how many tokens each had before it.
        self._requests: Sequence[Request] = ()
        self._taken: Mapping[int, int] | None = None

    def ahead(self) -> int:
        """How many of the next steps differ only in the lengths of their contexts; 0 if the next step is no such step.

        Requests may end with the last of them.
        """
        requests = self._engine.decoding
        if not requests or not self._engine.quiet:
            return 0
        # Every turn of every rank runs this: the loops call no function for each request, to be quick.
        steps, beyond = MOST_STEPS, 0
        for request in requests:
            token_ids = request.progress.token_ids
            tokens = len(token_ids)
            # Tokens until the request has its last one.
            left = min(token_ids[-1] - END_OF_SEQUENCE, request.limit - tokens)
            if left < 1 or tokens <= request.prompt_tokens:
                return 0
            if left < steps:
                steps = left
        for request in requests:
            progress = request.progress
            lacking = progress.computed + steps - progress.covered
            if lacking > 0:
                beyond += lacking
        # An upper bound of the blocks needed is enough: nearly always many more are free.
        return steps if beyond // BLOCK_TOKENS + len(requests) <= self._engine.pool.free_blocks else 0

    @property
    def context(self) -> tuple[int, int]:
        """How many requests the next quiet step has, and how many computed tokens they have together."""
        requests = self._engine.decoding
        return len(requests), sum(request.progress.computed for request in requests)

    def take(self, seconds: Sequence[float]) -> StepResult:
        """Take `len(seconds)` quiet steps, one after the other, that took this long."""
        self._requests, self._taken = list(self._engine.decoding), None
        tokens = []
        for request in self._requests:
            last = request.progress.token_ids[-1]
            tokens.append(range(last - 1, last - 1 - len(seconds), -1))
        return self._engine.take(seconds, tokens)

    def over(self) -> None:
        """A step of another kind begins."""
        self._taken = self.taken

    @property
    def taken(self) -> Mapping[int, int]:
        """By key, how many tokens requests had after the quiet steps taken last, which reported only requests' ends."""
        if self._taken is not None:
            return self._taken
        return {request.key: len(request.progress.token_ids) for request in self._requests}
