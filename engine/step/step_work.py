"""The work of one step: from what was planned to the rows of a batch."""

from collections.abc import Sequence

import msgspec

from engine.batch import Row, StepShape
from engine.pace.tails import Tails
from engine.plan.step_plan import Chunk
from engine.requests.request import Request


class StepWork(msgspec.Struct, frozen=True):
    """What one step computes: the next token of `decoding` with its drafts, then chunks of prompts."""

    decoding: Sequence[Request] = ()
    chunks: Sequence[Chunk[Request]] = ()
    # The most drafts of a row, and how many tokens are guessed behind each that is drawn.
    depth: int = 0

    def __bool__(self) -> bool:
        return bool(self.decoding or self.chunks)

    @property
    def scores_prompts(self) -> bool:
        """Whether some prompt's own tokens are to be scored."""
        return any(chunk.request.prompt_scores is not None for chunk in self.chunks)

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    def shape(self, stopping: bool, tails: Tails, waiting_prompts: bool = False, owes: bool = False) -> StepShape:
        """What this rank proposes to launch. waiting_prompts: whether prompts wait here to be computed; owes: see
        MixedSteps.
        """
        rows = self._rows(tails)
        if rows is None:
            decoded = sum(map(self._draws, self.decoding)) if self.depth else len(self.decoding)
            tokens = decoded + self.prompt_tokens
        else:
            tokens = rows * (1 + self.depth)
        return StepShape(
            tokens,
            rows is not None,
            stopping,
            self.depth,
            drawing=len(self.decoding) + sum(_ends(chunk) for chunk in self.chunks),
            beginning=sum(not chunk.request.progress.computed_at_most for chunk in self.chunks),
            waiting_prompts=int(waiting_prompts),
            decodes=bool(self.decoding),
            prefills=any(chunk.tokens < chunk.request.progress.left for chunk in self.chunks),
            rows=rows or 0,
            owes=owes and rows is not None,
        )

    def launch_rows(self) -> tuple[list[Request], list[Row]]:
        """The step's requests and the row of each, which from now on are in flight.

        A chunk of one token is computed as a decode row is, so it comes before longer ones.
        """
        work: list[Request | Chunk[Request]] = [
            *(sorted(self.decoding, key=self._draws) if self.depth else self.decoding),
            *sorted(self.chunks, key=lambda chunk: chunk.tokens > 1),
        ]
        requests = [each.request if isinstance(each, Chunk) else each for each in work]
        return requests, [self._launch_row(each, index) for index, each in enumerate(work)]

    def _rows(self, tails: Tails) -> int | None:
        """How many rows of a decode step compute all of this work; None if a decode step cannot."""
        rows = len(self.decoding)
        if all(chunk.tokens == 1 and chunk.request.prompt_scores is None for chunk in self.chunks):
            return rows + len(self.chunks)
        for chunk in self.chunks:
            taken = tails.rows(chunk, self.depth)
            if taken is None:
                return None
            rows += taken
        return rows if rows <= tails.captured_rows else None

    def _draws(self, request: Request) -> int:
        """The most tokens that the request's row yields. A request that decodes draws one at least."""
        return min(request.draws, 1 + self.depth) if self.depth else 1

    def _launch_row(self, work: Request | Chunk[Request], index: int) -> Row:
        if isinstance(work, Chunk):
            return _launch_chunk_row(work, index, self.depth)
        return _launch_decode_row(work, self._draws(work), index, self.depth)


class Proposal(msgspec.Struct, frozen=True):
    """What a rank has to compute in the next step, and the shape in which it could."""

    work: StepWork
    shape: StepShape
    # Whether prompts that the work leaves out may begin in the step after it, though nothing else happens.
    held_back: bool


def _ends(chunk: Chunk[Request]) -> bool:
    """Whether the chunk is the last of its prompt, so that a token is drawn behind it. Call it before the launch."""
    return chunk.tokens == chunk.request.progress.left


def _launch_decode_row(request: Request, draws: int, index: int, guesses: int) -> Row:
    """Row `index` of the next step: the request's last token, which may be in flight itself, and drafts behind it.

    guesses: how many the step makes.
    """
    progress = request.progress
    start, token_ids = progress.computed_at_most, progress.token_ids
    sampling, history, drafts, masks = request.sampling, request.history, draws - 1, request.masks
    thinking = request.thinking
    if progress.tokens_at_least > len(token_ids):
        follows = progress.drawing_row
        row = Row((), start, progress.block_ids, sampling, follows, history, drafts, thinking=thinking, masks=masks)
    elif drafts:
        known = [token_ids[-1], *progress.drafts[:drafts]]
        row = Row(known, start, progress.block_ids, sampling, None, history, drafts, thinking=thinking, masks=masks)
    else:
        last = token_ids[-1:]
        row = Row(last, start, progress.block_ids, sampling, history=history, thinking=thinking, masks=masks)
    progress.launched(draws, draws, index, guesses)
    return row


def _launch_chunk_row(chunk: Chunk[Request], index: int, guesses: int) -> Row:
    """Row `index` of the next step: a chunk of a prompt. A token is drawn behind the last chunk.

    It may begin with tokens whose KV is known and which are computed again.
    """
    request, progress = chunk.request, chunk.request.progress
    start = progress.computed_at_most
    end = start + chunk.tokens
    draws = _ends(chunk)
    sampling, history = (request.sampling, request.history) if draws else (None, None)
    scores = request.prompt_scores
    row = Row(
        progress.token_ids[start:end],
        start,
        progress.block_ids,
        sampling,
        history=history,
        shared=min(max(progress.known - start, 0), chunk.tokens),
        next_token=None if draws else progress.token_ids[end],
        thinking=request.thinking if draws else None,
        masks=request.masks if draws else None,
        prompt_logprobs=None if scores is None else scores.alternatives,
        sparse=request.sparse,
    )
    progress.launched(chunk.tokens, int(draws), index, guesses)
    return row
