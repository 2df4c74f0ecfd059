"""The work of one step: from what was planned to the rows of a batch."""

from collections.abc import Sequence

import msgspec

from engine.batch import Row, StepShape
from engine.batcher import Chunk
from engine.request import Request


class StepWork(msgspec.Struct, frozen=True):
    """What one step computes: the next token of `decoding`, then chunks of prompts."""

    decoding: Sequence[Request] = ()
    chunks: Sequence[Chunk[Request]] = ()

    def __bool__(self) -> bool:
        return bool(self.decoding or self.chunks)

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    def shape(self, stopping: bool) -> StepShape:
        """What this rank proposes to launch."""
        decode_only = all(chunk.tokens == 1 for chunk in self.chunks)
        return StepShape(len(self.decoding) + self.prompt_tokens, decode_only, stopping)

    def launch_rows(self) -> tuple[list[Request], list[Row]]:
        """The step's requests and the row of each, which from now on are in flight.

        A chunk of one token is computed as a decode row is, so it comes before longer ones.
        """
        chunks = sorted(self.chunks, key=lambda chunk: chunk.tokens > 1)
        requests = [*self.decoding, *(chunk.request for chunk in chunks)]
        rows = [_launch_decode_row(request, index) for index, request in enumerate(self.decoding)]
        rows += [_launch_chunk_row(chunk, index) for index, chunk in enumerate(chunks, len(rows))]
        return requests, rows


def _launch_decode_row(request: Request, index: int) -> Row:
    """Row `index` of the next step: the request's last token, which may be in flight itself."""
    progress = request.progress
    start, token_ids = progress.computed_at_most, progress.token_ids
    if progress.tokens_at_least > len(token_ids):
        row = Row((), start, progress.block_ids, request.sampling, progress.drawing_row, request.history)
    else:
        row = Row(token_ids[-1:], start, progress.block_ids, request.sampling, history=request.history)
    progress.launched(1, 1, index)
    return row


def _launch_chunk_row(chunk: Chunk[Request], index: int) -> Row:
    """Row `index` of the next step: a chunk of a prompt. A token is drawn behind the last chunk."""
    request, progress = chunk.request, chunk.request.progress
    start = progress.computed_at_most
    end = start + chunk.tokens
    draws = end == progress.tokens_at_most
    sampling, history = (request.sampling, request.history) if draws else (None, None)
    row = Row(progress.token_ids[start:end], start, progress.block_ids, sampling, history=history)
    progress.launched(chunk.tokens, int(draws), index)
    return row
