"""The work of one step: from what was planned to the rows of a batch."""

from collections.abc import Sequence

import msgspec

from engine.batch import Row
from engine.pace.tails import Tails
from engine.plan.step_plan import Chunk
from engine.requests.request import Request
from engine.step.shape import StepShape


class StepWork(msgspec.Struct, frozen=True):
    """What one step computes: the next token of `decoding` with its drafts, then chunks of prompts."""

    decoding: Sequence[Request] = ()
    chunks: Sequence[Chunk[Request]] = ()
    # The most drafts of a row, and how many tokens are guessed after each that is drawn.
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
            tokens=tokens,
            decode_only=rows is not None,
            stopping=stopping,
            drafts=self.depth,
            drawing=len(self.decoding) + sum(_ends(chunk) for chunk in self.chunks),
            beginning=sum(not chunk.request.progress.computed_at_most for chunk in self.chunks),
            waiting_prompts=int(waiting_prompts),
            decodes=bool(self.decoding),
            prefills=any(chunk.tokens < chunk.request.progress.left for chunk in self.chunks),
            rows=rows or 0,
            owes=owes and rows is not None,
        )

    def batch_rows(self) -> tuple[list[Request], list[Row]]:
        """The step's requests and the row of each. The rows are not in flight yet: see `Progress.launched`.

        A chunk of one token is computed as a decode row is, so it comes before longer ones.
        """
        decoding = sorted(self.decoding, key=self._draws) if self.depth else self.decoding
        chunks = sorted(self.chunks, key=lambda chunk: chunk.tokens > 1)
        requests = [*decoding, *(chunk.request for chunk in chunks)]
        return requests, [*map(self._decode_row, decoding), *map(_chunk_row, chunks)]

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

    def _decode_row(self, request: Request) -> Row:
        """The request's last token, which may be in flight itself, and the drafts after it."""
        progress, token_ids = request.progress, request.progress.token_ids
        drafts = self._draws(request) - 1 if self.depth else 0
        in_flight = progress.tokens_at_least > len(token_ids)
        known: Sequence[int] = ()
        if not in_flight:
            known = [token_ids[-1], *progress.drafts[:drafts]] if drafts else token_ids[-1:]
        return Row(
            known,
            progress.computed_at_most,
            progress.block_ids,
            request.sampling,
            progress.drawing_row if in_flight else None,
            request.history,
            drafts,
            thinking=request.thinking,
            masks=request.masks,
        )


class Proposal(msgspec.Struct, frozen=True):
    """What a rank has to compute in the next step, and the shape in which it could."""

    work: StepWork
    shape: StepShape
    # Whether prompts that the work leaves out may begin in the step after it, though nothing else happens.
    held_back: bool


def _ends(chunk: Chunk[Request]) -> bool:
    """Whether the chunk is the last of its prompt, so that a token is drawn after it. Call it before the launch."""
    return chunk.tokens == chunk.request.progress.left


def _chunk_row(chunk: Chunk[Request]) -> Row:
    """A token is drawn after the last chunk of a prompt. A chunk may begin with tokens whose KV is known and which are
    computed again.
    """
    request, progress = chunk.request, chunk.request.progress
    start = progress.computed_at_most
    end = start + chunk.tokens
    draws = _ends(chunk)
    sampling, history = (request.sampling, request.history) if draws else (None, None)
    scores = request.prompt_scores
    return Row(
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
