"""The steps that a worker runs before it serves, so that no request waits for a kernel to be compiled.

A process that serves again, in another role, runs only those steps that it has not run yet.

Kernels differ by the step's size, by how its rows attend, by how many of them draw, and by how they draw. Each of these
is run over its range, but not in all combinations, because no kernel depends on two of them. Steps that are not
captured run over one layer of each kind, since others of that kind launch the same kernels (`Model.short`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from engine.batch import Batch, History, Row
from engine.config import EngineConfig
from engine.model.context import DeviceState
from engine.model.prompt_forms import EXPANDED_TOKENS
from engine.runner.sizes import step_sizes
from engine.runner.steps import Steps
from engine.step.shape import StepShape, shape_of
from mesh.blocks import blocks_for
from mesh.domain.sampling import Sampling
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.observe.spans import span
from mesh.progress import ProgressLog

GREEDY = Sampling()
DRAWN = Sampling(temperature=1.0, top_p=0.9, top_k=50)
REPORTED = Sampling(top_logprobs=5)
PENALIZED = Sampling(temperature=1.0, min_p=0.1, frequency_penalty=1.0, logit_bias={0: 1.0})
# Changed logits are float32.
BIASED = Sampling(logit_bias={0: 1.0})
WAYS_TO_DRAW = (GREEDY, DRAWN, REPORTED, PENALIZED, BIASED)
# A key that no request has.
NO_REQUEST = -1
# What decides which kernels a step of the warm-up needs: see `kind_of`.
StepKind: TypeAlias = tuple[object, ...]
# After a prefix few queries attend in one form and many in another; for every model this covers sizes of both kinds.
MOST_AFTER_PREFIX = 512


def warm_up_steps(
    sizes: Sequence[int],
    context_tokens: int,
    max_requests: int,
    block: int,
    drafts: int = 0,
    sparse: SparsePrefill | None = None,
) -> Iterator[list[Row]]:
    """The rows of each step, the largest first, so that the others share its memory.

    sizes: from `step_sizes`, none above max_requests * context_tokens. All blocks of all rows are `block`, since no
    result is read. drafts: the most of a row; sparse: how long prompts are computed, None if exactly.
    """
    rows = _Rows(context_tokens, block)
    for size in reversed(sizes):
        yield rows.prompts(size)
    for size in sizes:
        if size <= min(MOST_AFTER_PREFIX, context_tokens - 1) and size.bit_count() == 1:
            yield [rows.last(size, GREEDY)]
    if sparse is not None and context_tokens > 1:
        yield [replace(rows.last(min(sizes[-1], context_tokens - 1), GREEDY), sparse=sparse)]
    for count in step_sizes(max_requests):
        if count < sizes[-1] and context_tokens > 1:
            yield [*[rows.last(1, GREEDY)] * (count - 1), rows.last(2, GREEDY)]
    together = [rows.last(1, sampling) for sampling in WAYS_TO_DRAW]
    decoding = min(max_requests - 1, sizes[-1] - 2)
    if decoding > 0 and context_tokens > 1:
        yield [*together[:decoding], rows.last(2, None)]
    if context_tokens > 2 + drafts:
        # Rows with drafts next to a prompt; then alone, more and more of them.
        for depth in range(1, 1 + drafts if decoding > 0 else 1):
            yield [rows.drafted(depth), rows.last(2, GREEDY)]
        for count in step_sizes(max_requests) if drafts else ():
            if count <= min(max_requests, sizes[-1] // (1 + drafts)):
                yield [rows.drafted(drafts)] * count
    yield together[:max_requests]
    for sampling in WAYS_TO_DRAW:
        yield [rows.last(1, sampling)] * max_requests


def decoding_steps(counts: Sequence[int], context_tokens: int, block: int) -> Iterator[list[Row]]:
    """The rows of steps that decode as many requests as each count says. Other arguments as of `warm_up_steps`."""
    rows = _Rows(context_tokens, block)
    yield from ([rows.last(1, GREEDY)] * count for count in counts)


def largest_steps(
    tokens: int, context_tokens: int, max_requests: int, block: int, drafts: int, sparse: SparsePrefill | None
) -> Iterator[list[Row]]:
    """The rows of the steps that take the most memory, one of each kind: `tokens` tokens of prompts after contexts that
    take all room for expanded keys, exactly and sparsely; as many requests as can be with costly draws, and with
    drafts. Other arguments as of `warm_up_steps`.
    """
    prompts = _Rows(min(EXPANDED_TOKENS, context_tokens), block).chunks(tokens)
    yield prompts
    if sparse is not None:
        yield [replace(row, sparse=sparse) for row in prompts]
    rows = _Rows(context_tokens, block)
    yield [rows.last(1, PENALIZED)] * max_requests
    if drafts and context_tokens > 2 + drafts and max_requests * (1 + drafts) <= tokens:
        yield [rows.drafted(drafts)] * max_requests


def warm_up(
    run: Callable[[Steps, Batch, StepShape], object],
    steps: Steps,
    state: DeviceState,
    config: EngineConfig,
    sizes: Sequence[int],
    context_tokens: int,
    warm: set[StepKind],
) -> None:
    """Run the steps that are not `warm` yet, and add them. sizes: see `warm_up_steps`."""
    drafts, sparse = config.drafts.most, config.sparse_prefill.offered
    short = steps.shortened()
    with span("engine.warm_up"):
        each = list(warm_up_steps(sizes, context_tokens, config.max_requests, state.padding_block, drafts, sparse))
        progress = ProgressLog("warming up: compiling what steps need", len(each))
        for rows in each:
            shape = replace(shape_of(rows), drafts=drafts)
            captured = steps.graphs.fit(shape)
            kind = kind_of(state, rows, steps.batches.size(shape.tokens), captured=captured)
            if kind not in warm:
                run(steps if captured else short, Batch(0, near_start(rows) if captured else rows), shape)
                warm.add(kind)
            progress.advance()
        for decode_only in (True, False):
            run(steps, Batch(0, ()), StepShape(sizes[0], decode_only, drafts=drafts))


def near_start(rows: Sequence[Row]) -> list[Row]:
    """The same rows of a captured step, after one token each. A graph launches the same kernels after any context, but
    attention of all layers to long ones takes time: of 256 rows with five drafts after 163,840 tokens three seconds.
    """
    return [replace(row, start=1, block_ids=row.block_ids[: blocks_for(1 + row.tokens)]) for row in rows]


def kind_of(state: DeviceState, rows: Sequence[Row], tokens: int, *, captured: bool) -> StepKind:
    """tokens: the number to which the step is padded; captured: whether the step runs as a graph."""
    of_rows = ((row.tokens, row.start, row.drafts, repr(row.sampling), row.sparse) for row in rows)
    return state.kv_pool.dtype, state.quantized_prompts, tokens, captured, *of_rows


class _Rows:
    """Makes rows within a context of `context_tokens` tokens, whose blocks are all the same."""

    def __init__(self, context_tokens: int, block: int) -> None:
        self._context_tokens = context_tokens
        self._block_ids = [block] * blocks_for(context_tokens)

    def prompts(self, tokens: int) -> list[Row]:
        """As few whole prompts as have this many tokens together."""
        whole, rest = divmod(tokens, self._context_tokens)
        lengths = [self._context_tokens] * whole + [rest] * (rest > 0)
        # As the engine orders them: rows of one token come first.
        return [
            Row([0] * length, 0, self._block_ids, GREEDY) for length in sorted(lengths, key=lambda length: length > 1)
        ]

    def chunks(self, tokens: int) -> list[Row]:
        """As few last chunks of contexts as have this many tokens together."""
        whole, rest = divmod(tokens, self._context_tokens)
        lengths = [self._context_tokens] * whole + [rest] * (rest > 0)
        return [self.last(length, GREEDY) for length in sorted(lengths, key=lambda length: length > 1)]

    def drafted(self, drafts: int) -> Row:
        """A row that decodes, with this many drafts."""
        start = self._context_tokens - 1 - drafts
        return Row([0] * (1 + drafts), start, self._block_ids, GREEDY, drafts=drafts)

    def last(self, tokens: int, sampling: Sampling | None) -> Row:
        """A row of the context's last tokens."""
        start = self._context_tokens - tokens
        history = History(NO_REQUEST, 0, [0] * self._context_tokens) if sampling is PENALIZED else None
        return Row([0] * tokens, start, self._block_ids, sampling, history=history)
