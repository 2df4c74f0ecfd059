"""Which tokens of a step draw, and what the draft layer computes behind the step: plain data, made of its rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from engine.batch import Row
from mesh.blocks import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Draws:
    """All draws of a step, row by row of those with sampling."""

    # One for each draw: the row as if it ended there.
    rows: Sequence[Row]
    # Indices of the tokens of the step behind which they draw.
    tokens: Sequence[int]
    # By row with sampling: its index in the step, its first draw, and the drafts that its draws are compared with.
    drawing: Sequence[int]
    first: Sequence[int]
    drafts: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of the draft layer: each token with the hidden state of the token before it.

    The draft layer computes one position later than the model, up to the token that is drawn; a prompt's first row also
    the prompt's first token, which nothing comes before.
    """

    # In the order in which they are computed; tokens that are drawn are 0.
    rows: Sequence[Row]
    # By token: the index of the token of the step before it, None where nothing comes before.
    sources: Sequence[int | None]
    # By token that is drawn: its index here, and the draw. Draws behind a wrong draft stand there too: nobody reads
    # what follows from them, and the next step overwrites it.
    drawn: Sequence[tuple[int, int]]
    # By row with sampling: the index of the first drawn token, and its position.
    first_drawn: Sequence[int]
    positions: Sequence[int]
    # By row with sampling: its blocks.
    tables: Sequence[Sequence[int]]

    @property
    def tokens(self) -> int:
        return len(self.sources)


def plan_draws(rows: Sequence[Row]) -> Draws:
    offsets = list(accumulate((row.tokens for row in rows), initial=0))
    drawing = [index for index, row in enumerate(rows) if row.sampling is not None]
    return Draws(
        rows=[_ending(rows[index], left) for index in drawing for left in range(rows[index].drafts, -1, -1)],
        tokens=[offsets[index + 1] - 1 - left for index in drawing for left in range(rows[index].drafts, -1, -1)],
        drawing=drawing,
        first=list(accumulate((rows[index].draws for index in drawing[:-1]), initial=0)) if drawing else [],
        drafts=[rows[index].token_ids[rows[index].tokens - rows[index].drafts :] for index in drawing],
    )


def plan_draft_rows(rows: Sequence[Row], draws: Draws, padding_block: int) -> DraftRows:
    """padding_block: what lies behind a row's blocks goes there."""
    offsets = list(accumulate((row.tokens for row in rows), initial=0))
    first_draws = dict(zip(draws.drawing, draws.first, strict=True))
    shifted = [_shifted(row, padding_block) for row in rows]
    # Rows of one token come first, as a context wants them.
    order = sorted(range(len(rows)), key=lambda index: shifted[index].tokens > 1)
    sources: list[int | None] = []
    drawn: list[tuple[int, int]] = []
    first_drawn: dict[int, int] = {}
    for index in order:
        row = rows[index]
        sources += [None] * (row.start == 0)
        sources += range(offsets[index], offsets[index + 1])
        if row.sampling is not None:
            first_drawn[index] = len(sources) - row.draws
            drawn += [(first_drawn[index] + draw, first_draws[index] + draw) for draw in range(row.draws)]
    return DraftRows(
        rows=[shifted[index] for index in order],
        sources=sources,
        drawn=drawn,
        first_drawn=[first_drawn[index] for index in draws.drawing],
        positions=[rows[index].end - rows[index].drafts for index in draws.drawing],
        tables=[shifted[index].block_ids for index in draws.drawing],
    )


def _ending(row: Row, left: int) -> Row:
    """The row without its last `left` tokens."""
    if not row.drafts:
        return row
    return msgspec.structs.replace(row, token_ids=row.token_ids[: row.tokens - left], drafts=0)


def _shifted(row: Row, padding_block: int) -> Row:
    """The draft layer's part of the row."""
    known = row.token_ids[: row.tokens - row.drafts]
    behind = [0] * row.draws if row.next_token is None else [row.next_token]
    token_ids = [*(known if row.start == 0 else known[1:]), *behind]
    block_ids = list(row.block_ids)
    if row.end >= len(block_ids) * BLOCK_TOKENS:
        block_ids.append(padding_block)
    start = row.start + 1 if row.start else 0
    return Row(token_ids, start, block_ids, None, drafts=row.drafts)
