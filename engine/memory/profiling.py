"""How much of the device's memory steps take, measured by running the largest."""

from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace

from engine.batch import History, Row
from engine.model.context import DeviceState
from engine.model.inputs import build_context
from engine.model.model import Model
from engine.model.prompt_forms import EXPANDED_TOKENS
from engine.runner import step_parts
from engine.runner.micro_batches import halves
from engine.runner.sampler import Sampler
from engine.step.shape import shape_of
from mesh.blocks import blocks_for
from mesh.domain.sampling import Sampling
from mesh.domain.sparse_prefill import SparsePrefill

# The sampling that takes the most memory.
COSTLY = Sampling(temperature=1.0, top_p=0.9, frequency_penalty=1.0)


def workspace_bytes(
    model: Model,
    state: DeviceState,
    step_tokens: int,
    max_requests: int,
    longest: int,
    sparse: SparsePrefill | None,
    *,
    two_batch: bool,
) -> int:
    """The most memory that the tensors of a step and the counts of the sampler take at a time. two_batch: steps are run
    in two micro-batches too.

    All blocks of a context may be the pool's first one, since no result is read. sparse: the attention of
    long prompts that ask for it; None if it is exact.
    """
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sampler = Sampler(max_requests, model.config.vocab_size, model.device, model.group)
    prompts = [_prompts(step_tokens, end) for end in ends_of_prompts(longest)]
    steps = [*prompts, _decoding(max_requests, longest)]
    if sparse is not None:
        steps += [[replace(row, sparse=sparse) for row in rows] for rows in prompts]
    for rows in steps:
        ways: list[list[Sequence[Row]]] = [[rows]]
        if two_batch:
            ways.append([part.rows for part in halves(rows, shape_of(rows), lambda tokens: tokens)])
        for parts in ways:
            logits = step_parts.logits(model, [build_context(model.config, part, state) for part in parts])
            sampler.draw(logits, [row for row in rows if row.sampling is not None])
            del logits
    return torch.cuda.max_memory_allocated() - before


def graph_bytes(capture: Callable[[], object]) -> int:
    """Memory that captured graphs keep."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphs = capture()
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved() - before
    del graphs
    return taken


def ends_of_prompts(longest: int) -> list[int]:
    """Lengths of contexts whose prompts take the most memory: `longest`, and the longest one at which a half, a quarter
    and so on of the heads take all the room for expanded keys.
    """
    end = min(EXPANDED_TOKENS, longest)
    while end * 2 <= longest:
        end *= 2
    return sorted({end, longest})


def _prompts(step_tokens: int, longest: int) -> list[Row]:
    """Prompts that end where contexts end, as many as a step has tokens for.

    A row of one token goes before them, because joining the results of several forms of attention takes memory too.
    """
    rows, left = _decoding(1, longest), step_tokens - 1
    while left:
        tokens = min(left, longest)
        rows.append(_last(tokens, longest))
        left -= tokens
    return sorted(rows, key=lambda row: len(row.token_ids) > 1)


def _decoding(max_requests: int, longest: int) -> list[Row]:
    return [_last(1, longest)] * max_requests


def _last(tokens: int, longest: int) -> Row:
    """The last tokens of a context."""
    history = History(0, 0, [0] * longest)
    return Row([0] * tokens, longest - tokens, [0] * blocks_for(longest), COSTLY, history=history)
