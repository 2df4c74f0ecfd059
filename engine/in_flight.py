"""A step in flight: launched, and not collected."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import Launched, Row
from engine.batcher import Chunk
from engine.request import Request


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """What the engine needs to know of a launched step when its samples come."""

    requests: Sequence[Request]
    # One a request.
    rows: Sequence[Row]
    launched: Launched
    # Seconds of the engine's clock.
    started: float
    decoding: int
    prompt_tokens: int


def launch_decode_row(request: Request, index: int) -> Row:
    """Row `index` of the next step: the request's last token, which may be in flight itself."""
    progress = request.progress
    start, token_ids = progress.computed_at_most, progress.token_ids
    if progress.tokens_at_least > len(token_ids):
        row = Row((), start, progress.block_ids, request.sampling, progress.drawing_row)
    else:
        row = Row(token_ids[-1:], start, progress.block_ids, request.sampling)
    progress.launched(1, 1, index)
    return row


def launch_chunk_row(chunk: Chunk[Request], index: int) -> Row:
    """Row `index` of the next step: a chunk of a prompt. A token is drawn behind the last chunk."""
    request, progress = chunk.request, chunk.request.progress
    start = progress.computed_at_most
    end = start + chunk.tokens
    draws = end == progress.tokens_at_most
    row = Row(progress.token_ids[start:end], start, progress.block_ids, request.sampling if draws else None)
    progress.launched(chunk.tokens, int(draws), index)
    return row
