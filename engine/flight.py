"""A step under way: launched, and not collected."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import Launched, Row
from engine.batcher import Chunk
from engine.request import Request


@dataclass(frozen=True, slots=True)
class Flight:
    """What the engine needs to know of a launched step when its samples come."""

    requests: Sequence[Request]
    # One a request.
    rows: Sequence[Row]
    launched: Launched
    # Seconds of the engine's clock.
    started: float
    decoding: int
    prompt_tokens: int


def decode_row(request: Request) -> Row:
    if request.draws_under_way:
        return Row((), request.computed, request.block_ids, request.sampling, follows=request.drawing_row)
    return Row(request.token_ids[-1:], request.computed, request.block_ids, request.sampling)


def chunk_row(chunk: Chunk[Request]) -> Row:
    request = chunk.request
    end = request.computed + chunk.tokens
    sampling = request.sampling if end == len(request.token_ids) else None
    return Row(request.token_ids[request.computed : end], request.computed, request.block_ids, sampling)


def follow(request: Request, row: Row, index: int) -> None:
    """Note what the row of the step that is launched does, as if it were done."""
    request.computed = row.end
    request.rows_under_way += 1
    if row.sampling is not None:
        request.draws_under_way += 1
        request.drawing_row = index
