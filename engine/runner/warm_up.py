"""The steps that a worker runs before it serves, so that no request waits for what is compiled at first use.

Kernels differ by the step's size, by how its rows attend, by how many of them draw, and how: each size is run, each way
to attend, numbers of rows up to the most, and each way to draw; not each of one with each of the others, which no
kernel knows together.
"""

from collections.abc import Iterator, Sequence

from engine.batch import Row
from engine.runner.step_sizes import step_sizes
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.sampling import Sampling

GREEDY = Sampling()
DRAWN = Sampling(temperature=1.0, top_p=0.9, top_k=50)
TOLD = Sampling(top_logprobs=5)
WAYS_TO_DRAW = (GREEDY, DRAWN, TOLD)
# Behind a prefix a few queries attend in one form and more in another: sizes on both sides, whatever the model.
MOST_BEHIND_PREFIX = 512


def warm_up_steps(sizes: Sequence[int], context_tokens: int, max_requests: int, block: int) -> Iterator[list[Row]]:
    """Rows of each step; the largest first, whose memory the others then share.

    sizes: of `step_sizes`, none above max_requests * context_tokens. All tokens are in `block`, over and over: nobody
    reads what is computed.
    """
    rows = _Rows(context_tokens, block)
    for size in reversed(sizes):
        yield rows.prompts(size)
    for size in sizes:
        if size <= min(MOST_BEHIND_PREFIX, context_tokens - 1) and size.bit_count() == 1:
            yield [rows.last(size, GREEDY)]
    for count in step_sizes(max_requests):
        if count < sizes[-1] and context_tokens > 1:
            yield [*[rows.last(1, GREEDY)] * (count - 1), rows.last(2, GREEDY)]
    together = [rows.last(1, sampling) for sampling in WAYS_TO_DRAW]
    beside = min(max_requests - 1, sizes[-1] - 2)
    if beside > 0 and context_tokens > 1:
        yield [*together[:beside], rows.last(2, None)]
    yield together[:max_requests]
    for sampling in WAYS_TO_DRAW:
        yield [rows.last(1, sampling)] * max_requests


class _Rows:
    """Rows within a context of so many tokens, all of them in one block."""

    def __init__(self, context_tokens: int, block: int) -> None:
        self._context_tokens = context_tokens
        self._block_ids = [block] * -(-context_tokens // BLOCK_TOKENS)

    def prompts(self, tokens: int) -> list[Row]:
        """Whole prompts, as few as hold so many tokens."""
        whole, rest = divmod(tokens, self._context_tokens)
        lengths = [self._context_tokens] * whole + [rest] * (rest > 0)
        # As the engine orders them: what has one token comes first.
        return [
            Row([0] * length, 0, self._block_ids, GREEDY) for length in sorted(lengths, key=lambda length: length > 1)
        ]

    def last(self, tokens: int, sampling: Sampling | None) -> Row:
        """The context's last tokens."""
        return Row([0] * tokens, self._context_tokens - tokens, self._block_ids, sampling)
