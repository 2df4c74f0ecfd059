"""Which chunks of prompts are computed as rows that decode, so that the step can be a captured graph. Pure.

Often only a few tokens of a prompt are left after cached KV. If the host launches their attention, launching the step
takes the host longer than computing it takes the device, on every rank of the worker. As rows of a graph they cost the
device no more: so few queries attend in the absorbed form either way, as decode rows do
(`engine.model.prompt_forms.absorbed_is_cheaper`).
"""

import msgspec

from engine.plan.step_plan import Chunk
from engine.requests.request import Request
from mesh.tails import MOST_TOKENS

# The largest graph without drafts has this many more rows than `max_requests`.
SPARE_ROWS = 64


def most_rows(max_requests: int, max_step_tokens: int) -> int:
    """Rows of the largest graph without drafts, unless `graph_rows` is configured."""
    return min(max_requests + SPARE_ROWS, max_step_tokens)


class Tails(msgspec.Struct, frozen=True):
    """What the backend captures: see `engine.backend.Backend`."""

    captured_rows: int = 0
    draft_layers: int = 0

    def rows_left(self, decoding: int) -> int:
        """How many rows of the largest graph may compute any part of a prompt while this many requests decode. None may
        with draft layers, since a chunk has to end its prompt there.
        """
        return 0 if self.draft_layers else max(self.captured_rows - decoding, 0)

    def rows(self, chunk: Chunk[Request], drafts: int) -> int | None:
        """How many rows with up to `drafts` drafts compute a chunk; None if it is no tail. Asked before its launch."""
        progress, tokens = chunk.request.progress, chunk.tokens
        if tokens > MOST_TOKENS or chunk.request.prompt_scores is not None:
            return None
        if not self.draft_layers:
            return tokens
        rows = -(-tokens // (1 + drafts))
        # Draft layers compute a prompt's first token together with the second one, and every row of their graphs draws,
        # so the chunk must not begin its prompt and has to end it. Several modules take one row alone: later ones read
        # what the step before has left of the token before a row.
        fits = progress.computed_at_most > 0 and tokens == progress.left and (rows == 1 or self.draft_layers == 1)
        return rows if fits else None
